"""The privacy controller of the `paper` mechanism: the covariance of a batch, sigma and the extra noise that follow from it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dpulr
from dpulr.errors import ModelRefused
from dpulr.paper.covariance import Covariance
from tests.support.algorithm_1 import BASE, Literal, Residual, convolutions, data, fitted_to, images
from tests.support.core import CPU, fit, normed_mlp, total


# --- the covariance of a batch --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [normed_mlp, convolutions, images, Residual])
@pytest.mark.parametrize("records", [2, 4, 40])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_the_spectrum_is_that_of_the_dense_matrix(make: Any, records: int) -> None:
    """Smallest eigenvalue, rank, and the covariance of the extra noise, against a dense decomposition; thin and not."""
    fitted, x, y = fitted_to(make, dpulr.Paper(**BASE), records)
    literal = Literal(fitted.forward.model, data(records), fitted.settings, rate=1.0, threshold=records)
    with torch.inference_mode():
        clean = fitted.forward.passes.clean(x, y)
        for blocks, call, layer in zip(fitted.blocks, clean.calls, literal.layers, strict=True):
            covariance = Covariance(blocks, fitted.dtype, CPU)
            blocks.add(call, clean.losses, covariance)
            with torch.inference_mode(False):
                dense = literal.covariance(layer)
            values, q = torch.linalg.eigh(dense)
            expected = values[0].item() if values[0] > 1e-10 * values[-1] else 0.0
            assert covariance.smallest() == pytest.approx(expected, rel=1e-6, abs=1e-9)
            assert covariance.rank() * blocks.copies == int((values > 1e-10 * values[-1]).sum())
            # The linear map from standard normal noise to extra noise, column by column: it must be the dense square root.
            target, credit = 0.8, 0.3 / values[-1].item()
            for c in (credit, 40 * credit):
                columns = []
                for unit in torch.eye(len(values), dtype=torch.float64):
                    packed = blocks.pack(blocks.site.rule.split(unit))
                    noise = blocks.unpack(covariance.extra_noise(packed, target, c))
                    columns.append(torch.cat([noise[name].flatten() for name in blocks.site.parameters]))
                root = q @ torch.diag((target**2 - c * values).clamp_min(0).sqrt()) @ q.t()
                torch.testing.assert_close(torch.stack(columns, 1), root, rtol=1e-6, atol=1e-6)


def test_embeddings_have_a_block_per_token() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 3)).double()
    x, y = torch.tensor([[1, 2], [2, 2], [0, 5], [3, 4]]), torch.tensor([0, 1, 2, 0])
    fitted = fit(dpulr.Paper(**BASE), model, (x[:1], y[:1]))
    with torch.inference_mode():
        clean = fitted.forward.passes.clean(x, y)
        covariance = Covariance(fitted.blocks[0], fitted.dtype, CPU)
        fitted.blocks[0].add(clean.calls[0], clean.losses, covariance)
        squares = clean.losses.square()
        counts = [squares[0], squares[0] + 2 * squares[1], squares[3], squares[3], squares[2]]
        torch.testing.assert_close(covariance.decomposed()[0].flatten()[1:], torch.stack(counts))
        assert covariance.smallest() == pytest.approx(min(c.item() for c in counts))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_records_that_are_not_finite_add_nothing_to_a_convolution(bad: float) -> None:
    fitted, x, y = fitted_to(images, dpulr.Paper(**BASE, remedy="extra-noise"), 6)
    found = []
    with torch.inference_mode():
        for records in (x[:5], torch.cat([x[:5], torch.full_like(x[:1], bad)])):
            clean = fitted.forward.passes.clean(records, y[: len(records)])
            covariances = [Covariance(blocks, fitted.dtype, CPU) for blocks in fitted.blocks]
            for blocks, call, covariance in zip(fitted.blocks, clean.calls, covariances, strict=True):
                blocks.add(call, clean.losses, covariance)
            found.append([covariance.decomposed()[0] for covariance in covariances[1:]])
    torch.testing.assert_close(found[0][:2], found[1][:2])
    assert bool(torch.isfinite(total(fitted, records, y[:6]).flat).all())


# --- what it decides ------------------------------------------------------------------------------------------------------
def test_eq_sigma_is_exact_in_single_precision() -> None:
    """Eigenvalues that differ by five orders of magnitude: in float32 the smallest would drown in rounding."""
    torch.manual_seed(0)
    x, y = torch.randn(1200, 300), torch.arange(1200) % 3
    x[:, -1] *= 5e-3
    sigmas = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model, rows = nn.Sequential(nn.Linear(300, 3)).to(dtype), x.to(dtype)
        fitted = fit(dpulr.Paper(sigma=1e3, target_std=1.0, remedy="none"), model, (rows[:1], y[:1]), noise=None)
        sigmas.append(total(fitted, rows, y).controls[0].sigma)
    assert sigmas[0] == pytest.approx(sigmas[1], rel=1e-4)


@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_chunks_of_records_change_nothing() -> None:
    """The controller sees the whole batch, whatever the memory limit splits."""
    sigmas = []
    for limit in (None, 20_000):
        fitted, x, y = fitted_to(normed_mlp, dpulr.Paper(**BASE, remedy="auto"), 60, memory_limit=limit)
        sigmas.append([control.sigma for control in total(fitted, x, y).controls])
    assert len(list(fitted.chunks.parts((x, y), None, fitted.chunks.most))) > 1
    assert sigmas[0] == pytest.approx(sigmas[1])


@pytest.mark.parametrize("make", [normed_mlp, images])
def test_given_sigma_one_clean_pass_does(make: Any) -> None:
    """With extra noise chunks are observed and estimated in one go; the covariance is that of the whole batch."""
    found = []
    for limit in (None, 300_000 if make is images else 20_000):
        fitted, x, y = fitted_to(make, dpulr.Paper(**BASE, remedy="extra-noise"), 60, memory_limit=limit)
        covariances = total(fitted, x, y).extra
        with torch.inference_mode():
            found.append([covariance.decomposed()[0] for covariance in covariances if covariance is not None])
    assert len(list(fitted.chunks.parts((x, y), None, fitted.chunks.most))) > 1
    torch.testing.assert_close(found[0], found[1])


def test_lacking_rank_is_reported_by_name() -> None:
    fitted, x, y = fitted_to(normed_mlp, dpulr.Paper(**BASE, remedy="none"), 3)
    with pytest.raises(ModelRefused, match=r"'0' \(Linear\): the covariance has rank 12 of 24"):
        total(fitted, x, y)
    fitted, x, y = fitted_to(normed_mlp, dpulr.Paper(**BASE), 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            total(fitted, x, y)
    said = [str(w.message) for w in caught if "'0'" in str(w.message)]
    assert len(said) == 1
    assert "rank 12 of 24, so extra noise is added" in said[0]


def test_clipping_is_layer_by_layer() -> None:
    """A record's gradient has norm C in every layer, so sqrt(layers) C in all: the first item of docs/errata.md."""
    fitted, x, y = fitted_to(normed_mlp, dpulr.Paper(**{**BASE, "sigma": 1e-3}, target_std=0), 1)
    assert [part.norm().item() for part in fitted.parts(total(fitted, x, y).flat)] == pytest.approx([0.7] * 3)
