"""Binary weights, int8 layers and fake quantisation: run in batches, moved at their output, and refused where scales are shared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn.utils.parametrize import register_parametrization

import dpulr
from dpulr.errors import ModelRefused
from dpulr.model.layers.straight_through import RoundedConvRule, RoundedLinearRule, StraightThroughRule
from dpulr.model.prepare import prepare
from dpulr.model.replay import TracedPasses
from dpulr.model.value_reads import observe
from tests.support.core import CPU, LOSS, engine, fit, points, total, train

EXAMPLE = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))
IMAGE = (torch.zeros(1, 2, 6, 6), torch.zeros(1, dtype=torch.int64))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize_per_tensor.*", "ignore:.*[Oo]bserver.*")


# --- int8 -----------------------------------------------------------------------------------------------------------------
class Eager(nn.Module):
    """A linear layer between the stubs that torch's eager quantisation wants."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layer, self.leave = tq.QuantStub(), nn.Linear(6, 6), tq.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layer(self.enter(x)))


def observed() -> nn.Module:
    torch.manual_seed(0)
    model = Eager().eval()
    model.qconfig = tq.get_default_qconfig("x86")
    tq.prepare(model, inplace=True)
    model(torch.rand(100, 6))
    return model


def static() -> nn.Module:
    return tq.convert(observed())


def static_graph() -> nn.Module:
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval()
    model = prepare_fx(plain, tq.get_default_qconfig_mapping("x86"), (torch.rand(2, 6),))
    model(torch.rand(100, 6))
    return convert_fx(model)


def dynamic() -> nn.Module:
    torch.manual_seed(0)
    return tq.quantize_dynamic(nn.Sequential(nn.Linear(6, 6)), {nn.Linear})


@pytest.mark.parametrize("frozen", [static, static_graph])
@pytest.mark.parametrize("front", [True, False])
def test_static_int8_layers_run_in_batches(frozen: Callable[[], nn.Module], front: bool) -> None:
    trained = nn.Linear(6, 6)
    model = nn.Sequential(frozen(), trained) if front else nn.Sequential(trained, frozen())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="running")
        assert isinstance(prepare(model, LOSS, EXAMPLE, CPU).passes, TracedPasses)
    run = engine(model, points(), mechanism=dpulr.HiddenDirection(), batch_size=8)
    assert train(run) == 4
    assert run.guarantee == "certified"


def test_dynamic_quantisation_is_refused_with_the_static_way() -> None:
    message = r"'0.0' \(Linear\) mixes records: .* takes one scale per batch.* static scales, .*torch.ao.quantization.prepare"
    with pytest.raises(ModelRefused, match=message):
        prepare(nn.Sequential(dynamic(), nn.Linear(6, 3)), LOSS, EXAMPLE, CPU)


# --- what may be read -----------------------------------------------------------------------------------------------------
class Reads(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(6, 3), read
        self.register_buffer("scale", torch.full((2,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(self.read(self, x))


@pytest.mark.parametrize(
    ("read", "alone"),
    [
        (lambda m, x: m.scale[0], False),
        (lambda m, x: (m.scale * 2 + m.scale.sum())[1], False),
        (lambda m, x: m.scale.tolist()[0], False),
        (lambda m, x: m.layer.weight.abs().max(), False),
        (lambda m, x: x.sum(), True),
        (lambda m, x: (m.scale[0] * x).sum(), True),
        (lambda m, x: x.tolist()[0][0], True),
        (lambda m, x: m.scale.clone().copy_(x[0, :2])[0], True),
        (lambda m, x: m.scale.clone().index_fill_(0, x[0, :1].long(), 5.0)[0], True),
        (lambda m, x: torch.from_numpy(x.numpy().copy()).sum(), True),  # it came in another way
        (lambda m, x: torch.zeros(1) + x.shape[0], False),  # what depends on the batch's size shows when sizes are compared
        (lambda m, x: m.scale.clone().normal_()[0], True),
    ],
    ids=["buffer", "of buffers", "list", "weights", "input", "both", "input as list", "copy", "by index", "numpy", "new", "random"],
)
def test_only_what_no_record_has_a_part_in_may_be_read(read: Callable[[Any, Tensor], Any], alone: bool) -> None:
    assert (observe(Reads(read), LOSS, EXAMPLE, CPU).reads is not None) == alone


def test_a_buffer_that_records_were_written_to_may_not_be_read() -> None:
    def through_a_view(model: Any, x: Tensor) -> Tensor:
        model.scale[0] = x.sum()
        return model.scale[0]

    assert observe(Reads(through_a_view), LOSS, EXAMPLE, CPU).reads is not None


# --- rounded weights ------------------------------------------------------------------------------------------------------
class Binary(nn.Module):
    """Weights held as a raw parameter, used by their signs."""

    def __init__(self, inputs: int = 6, outputs: int = 5, scale: bool = False) -> None:
        super().__init__()
        self.raw, self.offset, self.scale = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.zeros(outputs)), scale

    def matrix(self) -> Tensor:
        return torch.sign(self.raw) * (self.raw.abs().mean() if self.scale else 1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix().t() + self.offset


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sign()


def parametrized() -> nn.Module:
    layer = nn.Linear(6, 5, bias=False)
    register_parametrization(layer, "weight", Signs())
    return layer


def frozen_qat(model: nn.Module, example: Tensor, *, freeze: bool = True) -> nn.Module:
    model.train().qconfig = tq.get_default_qat_qconfig("x86")
    tq.prepare_qat(model, inplace=True)
    model(example)
    return model.apply(tq.disable_observer) if freeze else model


def qat(*, freeze: bool = True) -> nn.Module:
    model = nn.Sequential(tq.QuantStub(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return frozen_qat(model, torch.rand(100, 6), freeze=freeze)


class BinaryConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight.sign(), self.bias)


class RawConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(4, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.raw.sign(), stride=2, padding=1)


LINEAR: dict[str, Callable[[], nn.Module]] = {
    "raw": Binary,
    "scaled": lambda: Binary(100, 20, scale=True),
    "parametrized": parametrized,
    "fake": lambda: qat()[1],
}


@pytest.mark.parametrize("name", LINEAR)
def test_rounded_linear_layers_are_moved_at_their_output(name: str) -> None:
    torch.manual_seed(0)
    layer = LINEAR[name]()
    inputs = next(p for p in layer.parameters() if p.dim() == 2).shape[1]
    example = (torch.zeros(1, inputs), torch.zeros(1, dtype=torch.int64))
    (site,) = prepare(nn.Sequential(layer), LOSS, example, CPU).sites
    assert isinstance(site.rule, RoundedLinearRule)
    assert site.space == "output"


@pytest.mark.parametrize(
    "layer", [BinaryConv(2, 4, 3, padding=1, groups=2), RawConv(), nn.Conv2d(2, 4, 3)], ids=["own", "raw", "fake"]
)
def test_rounded_convolutions(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Flatten())
    if type(layer) is nn.Conv2d:
        model = frozen_qat(nn.Sequential(tq.QuantStub(), *model), torch.rand(8, 2, 6, 6))
    (site,) = prepare(model, LOSS, IMAGE, CPU, space="known-output").sites
    assert isinstance(site.rule, RoundedConvRule)
    run = engine(model, torch.utils.data.TensorDataset(torch.rand(40, 2, 6, 6), torch.arange(40) % 3), batch_size=8)
    assert train(run, 1) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda w: torch.tanh(w),  # has a gradient of its own
        lambda w: w.sign().flip(0),  # does not look like the weight
        lambda w: w.sign().cumsum(0),
    ],
    ids=["smooth", "elsewhere", "sums"],
)
def test_other_layers_are_moved_in_their_weights(change: Callable[[Tensor], Tensor]) -> None:
    class Own(Binary):
        def matrix(self) -> Tensor:
            return change(self.raw)

    torch.manual_seed(0)
    (site,) = prepare(nn.Sequential(Own()), LOSS, EXAMPLE, CPU).sites
    assert not isinstance(site.rule, StraightThroughRule)


class OfTheInput(Binary):
    def forward(self, x: Tensor) -> Tensor:
        return x.square() @ self.matrix().t()


def test_a_layer_that_is_not_affine_in_its_input_is_moved_in_its_weights() -> None:
    (site,) = prepare(nn.Sequential(OfTheInput()), LOSS, EXAMPLE, CPU).sites
    assert site.space == "weight"


@pytest.mark.parametrize("mechanism", [dpulr.HiddenDirection(repeats=3), dpulr.Gaussian(repeats=2), dpulr.Gradient()])
def test_a_rounded_layer_gets_what_a_linear_layer_with_its_matrix_gets(mechanism: Any) -> None:
    """The literal version: nn.Linear that holds the rounded weights. Same directions, same sums."""
    torch.manual_seed(0)
    binary, head = Binary(), nn.Linear(5, 3)
    literal = nn.Linear(6, 5)
    literal.load_state_dict({"weight": binary.matrix().detach(), "bias": binary.offset.detach()})
    x, y = torch.randn(7, 6), torch.arange(7) % 3
    sums = [total(fit(mechanism, nn.Sequential(layer, nn.Tanh(), head)), x, y) for layer in (binary, literal)]
    torch.testing.assert_close(*sums)


# --- fake quantisation ----------------------------------------------------------------------------------------------------
def test_fake_quantisation_with_frozen_observers_is_trained() -> None:
    model = qat()
    run = engine(model, points(), mechanism=dpulr.HiddenDirection(), batch_size=8)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert not run.forward.recordwise
    assert train(run) == 4
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_observers_that_learn_are_refused_by_name() -> None:
    with pytest.raises(
        ModelRefused, match=r"'0.activation_post_process' \(.*FakeQuantize\) has an observer that learns.*disable_obs"
    ):
        prepare(qat(freeze=False), LOSS, EXAMPLE, CPU)
    with pytest.raises(ModelRefused, match=r"'0.enter.activation_post_process' \(.*\) is an observer that learns.*\.convert"):
        prepare(nn.Sequential(observed(), nn.Linear(6, 3)), LOSS, EXAMPLE, CPU)
