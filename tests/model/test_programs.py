"""TorchScript, torch.export and torch.compile: as a frozen box or trained, with the losses of the module they were made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpulr.errors import ModelRefused
from dpulr.model.layers import Call
from dpulr.model.layers.base import LayerRule
from dpulr.model.layers.scripted import ScriptRule
from dpulr.model.prepare import prepare
from dpulr.model.sites import OutputSite, WeightSite
from tests.support.core import LOSS, engine, points

CPU = torch.device("cpu")
EXAMPLE = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))
Make = Callable[[nn.Module], nn.Module]


def middle() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh())


def around(part: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), part, nn.Linear(4, 3))


def exported(module: nn.Module) -> nn.Module:
    records = torch.export.Dim("records", min=1, max=4096)
    return torch.export.export(module, (torch.rand(2, 5),), dynamic_shapes=({0: records},)).module()


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


PROGRAMS: dict[str, Make] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.rand(2, 5)),
    "export": exported,
    "compile": lambda module: torch.compile(module, backend="eager"),
    "compile in place": in_place,
}
slow = pytest.mark.slow
ALL = [pytest.param(name, marks=[] if name in ("script", "trace") else slow, id=name) for name in PROGRAMS]


def made(name: str, module: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return PROGRAMS[name](module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_program_inside_a_model_gives_its_losses(name: str, trained: bool) -> None:
    """Frozen it is a box; trained it is moved in its weights, or, if it can be looked into, layer by layer."""
    part = made(name, middle())
    for parameter in part.parameters():
        parameter.requires_grad_(trained)
    forward = prepare(around(part), LOSS, EXAMPLE, CPU)
    plain = prepare(around(middle().requires_grad_(trained)), LOSS, EXAMPLE, CPU)
    inner = [site for site in forward.sites if site.name.startswith("1")]
    assert [type(site) for site in inner] == [OutputSite if "compile" in name else WeightSite] * trained
    batch = torch.rand(7, 6), torch.arange(7) % 3
    with torch.inference_mode():
        clean, expected = forward.passes.clean(*batch), plain.passes.clean(*batch)
        torch.testing.assert_close(clean.losses, expected.losses)
        for site, other in ((0, 0), (-1, -1)):
            moved = forward.sites[site].moved(clean.calls[site], torch.ones(2, 7, forward.sites[site].full_dim))
            index, place = site % len(forward.sites), other % len(plain.sites)
            torch.testing.assert_close(forward.losses(clean, index, moved), plain.losses(expected, place, moved))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mechanism", ["hidden-direction", "gradient", "zeroth-order", "gaussian"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_a_whole_program_is_trained(name: str, mechanism: str) -> None:
    torch.manual_seed(0)
    model = made(name, nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    running = engine(model, points(features=5), mechanism=mechanism, batch_size=8, steps=2)
    for batch in running.batches():
        running.step(*batch)
    assert running.privacy_spent().guarantee == "certified"
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_scripted_module_are_those_of_torch_func() -> None:
    module = middle()
    script = made("script", module)
    rules = LayerRule(module, dict(module.named_parameters())), ScriptRule(script, dict(script.named_parameters()))
    x = torch.rand(3, 5)
    call = Call((x,), {}, module(x).detach())
    moves, slope = torch.randn(2, 3, rules[0].weight_dim), torch.randn(3, 4)
    kept = [parameter.detach().clone() for parameter in script.parameters()]
    with torch.inference_mode():
        plain, scripted = (rule.with_weights(call, moves) for rule in rules)
        torch.testing.assert_close(plain, scripted)
        plain, scripted = (rule.record_weight_gradients(call, slope) for rule in rules)
        torch.testing.assert_close(plain, scripted)
    assert all(torch.equal(a, b) for a, b in zip(kept, script.parameters(), strict=True))


class Counts(nn.Module):
    """Writes a buffer, in place or by assignment."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.shows = shows
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.seen if self.shows else x
        self.seen = self.seen + 1
        return out


@pytest.mark.filterwarnings("ignore")
def test_state_of_a_scripted_module_is_put_back_or_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 3), made("script", Counts(False)))
    forward = prepare(model, LOSS, EXAMPLE, CPU)
    with torch.inference_mode():
        forward.passes.clean(torch.rand(4, 6), torch.zeros(4, dtype=torch.int64))
    assert model[1].seen.tolist() == [0]
    with pytest.raises(ModelRefused, match=r"keeps state from one call to the next .buffer 'seen' of '1' .RecursiveScriptModule"):
        prepare(nn.Sequential(nn.Linear(6, 3), made("script", Counts(True))), LOSS, EXAMPLE, CPU)


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_script_is_a_box() -> None:
    """torch.jit.freeze leaves neither parameters nor a mode."""
    part = torch.jit.freeze(made("script", middle().eval()))
    assert [site.name for site in prepare(around(part), LOSS, EXAMPLE, CPU).sites] == ["0", "2"]


@pytest.mark.slow
def test_a_program_that_is_no_module_is_refused_with_what_to_give() -> None:
    program = torch.export.export(middle(), (torch.rand(2, 5),))
    with pytest.raises(ModelRefused, match=r"is an ExportedProgram.*\.module\(\)"):
        prepare(program, LOSS, EXAMPLE, CPU)  # type: ignore[arg-type]
