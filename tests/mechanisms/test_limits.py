"""Settings so small that rounding would decide: refused, and harmless where they are just allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr.errors import InvalidArgument
from tests.support.core import fit, mlp, total


@pytest.mark.parametrize("kappa", [1e-46, 1e-31, 0.0])
def test_a_kappa_below_float32_is_refused(kappa: float) -> None:
    with pytest.raises(InvalidArgument, match=r"kappa is .* at least 1e-30"):
        dpulr.HiddenDirection(kappa=kappa)


@pytest.mark.parametrize("kappa", [1e-30, 1e-3, 1e38])
def test_bits_are_finite_whatever_kappa(kappa: float) -> None:
    """One record with a flat loss must not turn the whole release into NaN."""
    fitted = fit(dpulr.HiddenDirection(kappa=kappa), mlp())
    bits = fitted.bit(torch.tensor([0.0, 1e-45, -3e38, 3e38, torch.nan, torch.inf]), torch.tensor(1 / kappa))
    assert bool(((bits >= -1) & (bits <= 1)).all())
    assert bits[0] == bits[4] == 0
    x = torch.cat([torch.zeros(1, 6), torch.full((1, 6), 1e30), torch.randn(4, 6)])
    assert bool(torch.isfinite(total(fitted, x, torch.zeros(6, dtype=torch.int64))).all())


def test_a_radius_that_amplifies_rounding_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"radius is 0\.0001; it must be a finite number of at least 0\.0005"):
        dpulr.ZerothOrder(radius=1e-4)


class Apart(nn.Module):
    """Raises on a large batch, once it is told so: each record is then run without the others, among synthetic ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.most = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)), 10**9

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise RuntimeError
        return self.layers(x)


@pytest.mark.slow
def test_a_record_s_slopes_do_not_depend_on_the_others_at_all() -> None:
    """Losses of a batch and of each record without the others are the same to the last bit."""
    model = Apart()
    fitted = fit(dpulr.ZerothOrder(radius=5e-4, repeats=4), model)
    x, y = torch.randn(400, 6, generator=torch.Generator().manual_seed(1)), torch.arange(400) % 3
    public = fitted.draw_public(0)
    together = total(fitted, x, y, public=public)
    model.most = fitted.rows.of(1)
    alone = total(fitted, x, y, public=public)
    assert together.norm() > 1
    torch.testing.assert_close(together, alone, rtol=1e-14, atol=1e-12)
