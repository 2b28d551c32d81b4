"""Models and losses that can't be trained with a guarantee are refused by the name of the culprit, before any record is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpulr.errors import ModelRefused
from tests.support.core import LOSS, engine
from tests.support.refusals import Watched, refused


# --- models that mix records ----------------------------------------------------------------------------------------------
class Functional(nn.Module):
    """A linear layer, then an operation that mixes records somewhere in the forward pass."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.mix = nn.Linear(6, 4), nn.Linear(4, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.mix(self.first(x)))


class WithoutState(nn.Module):
    """A recurrent layer that takes the batch for a sequence: forgotten batch_first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Place(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + torch.arange(len(x)).view(-1, 1))


def zero_head() -> nn.Module:
    """The last layer starts at zero, so that nothing shows before the first step."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    nn.init.zeros_(model[2].weight)
    return model


def dead_head() -> nn.Module:
    model = nn.Sequential(*zero_head(), nn.ReLU())
    nn.init.constant_(model[2].bias, -100.0)
    return model


class RunningSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


torch.manual_seed(0)
MIXING: dict[str, tuple[nn.Module, str]] = {
    "batch norm": (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), r"'1' \(BatchNorm1d\) mixes records"),
    "without affine": (nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, affine=False)), r"'1' \(BatchNorm1d\) mixes records"),
    "without statistics": (
        nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
        r"'1' \(BatchNorm1d\) mixes records",
    ),
    "first": (nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), r"'0' \(BatchNorm1d\) mixes records"),
    "functional": (Functional(lambda h: F.batch_norm(h, None, None, training=True)), "before 'second' mixes records"),
    "mean": (Functional(lambda h: h - h.mean(0)), "before 'second' mixes records"),
    "softmax over records": (Functional(lambda h: h.softmax(0)), "before 'second' mixes records"),
    "running sum": (Functional(lambda h: h.cumsum(0)), "before 'second' mixes records"),  # a record sees those before it only
    "running sum from behind": (Functional(lambda h: h.flip(0).cumsum(0).flip(0)), "before 'second' mixes records"),
    "neighbour": (Functional(lambda h: h + h.roll(1, 0)), "before 'second' mixes records"),
    "place": (Functional(lambda h: h * (1 + torch.arange(len(h)).view(-1, 1))), "before 'second' mixes records"),
    "size": (Functional(lambda h: h / len(h)), "before 'second' mixes records"),
    "numpy": (Functional(lambda h: h - torch.from_numpy(h.numpy().max(0))), "before 'second' mixes records"),
    "at the end": (nn.Sequential(nn.Linear(6, 3), nn.Softmax(0)), r"'1' \(Softmax\) mixes records"),
    "sequence along records": (Functional(WithoutState(nn.RNN(4, 4))), "mixes records"),
    "hidden by zeros": (zero_head(), r"'1' \(BatchNorm1d\) mixes records"),
    "hidden by dead units": (dead_head(), r"'1' \(BatchNorm1d\) mixes records"),
    "tiny": (Functional(lambda h: 1e-4 * (h - h.mean(0))), "before 'second' mixes records"),
    "sign of the sum": (Functional(lambda h: torch.where(h.sum() > 0, h, -h)), "before 'second' mixes records"),
    "beside dropout": (nn.Sequential(nn.Linear(6, 4), nn.Dropout(), Place(), nn.Linear(4, 3)), r"'2' \(Place\) mixes records"),
    "before any layer": (nn.Sequential(RunningSum(), nn.Linear(6, 3)), r"'0' \(RunningSum\) mixes records"),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_records_is_refused_by_name(name: str) -> None:
    model, message = MIXING[name]
    for replay in ("auto", "hook"):
        refused(ModelRefused, message, model, replay=replay)


def test_a_shared_sign_is_seen_whatever_the_initial_weights() -> None:
    """A sum over records changes its sign only if the others outweigh the rest."""
    for seed in range(20):
        torch.manual_seed(seed)
        refused(ModelRefused, "before 'second' mixes records", Functional(lambda h: torch.where(h.sum() > 0, h, -h)))


def test_mixing_of_tokens_is_seen() -> None:
    """One token per record: synthetic tokens must differ, or a mean over records would not move."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    tokens = torch.utils.data.TensorDataset(torch.zeros(40, dtype=torch.int64), torch.arange(40) % 3)
    refused(ModelRefused, r"'1' \(BatchNorm1d\) mixes records", model, data=tokens)


@pytest.mark.parametrize("training", [True, False])
def test_batch_statistics_leave_no_trace(training: bool) -> None:
    """The check itself must not change the buffers; in eval mode, where nothing is mixed, BatchNorm is accepted."""
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).train(training)
    model[1].requires_grad_(False)
    before = [buffer.clone() for buffer in model.buffers()]
    if training:
        refused(ModelRefused, "BatchNorm1d", model)
    else:
        engine(model, Watched(), batch_size=8)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


# --- models that keep state -----------------------------------------------------------------------------------------------
class Counter(nn.Module):
    """Running statistics that do not show in the output."""

    def __init__(self, *, shows: bool) -> None:
        super().__init__()
        self.linear, self.shows = nn.Linear(6, 3), shows
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) + (self.seen if self.shows else 0)
        self.seen += len(x)
        return out


def test_state_that_shows_is_refused() -> None:
    refused(ModelRefused, r"keeps state from one call to the next \(buffer 'seen' of the model .Counter.", Counter(shows=True))


def test_state_that_shows_in_eval_mode_is_refused() -> None:
    """Statistics of each record, so that nothing is mixed; they are used after training only."""
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 3))
    refused(ModelRefused, r"in eval mode the model .Sequential. keeps state.*'running_mean' of '1' .InstanceNorm1d", model)


# --- losses ---------------------------------------------------------------------------------------------------------------
def scalar(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (nn.CrossEntropyLoss(), r"one value per record: for \d records it returned shape \(\)\. Pass reduction='none'"),
        (scalar, "one value per record"),
        (lambda output, target: output, r"one value per record.*\(5, 3\)\. Average over .* with \.mean\(1\)"),
        (
            lambda output, target: output.view(-1, 3, 1),
            r"one value per record.*\(5, 3, 1\)\. Average over .* with \.mean\(\(1, 2\)\)",
        ),
        (lambda output, target: LOSS(output, target).unsqueeze(1), r"one value per record.*\(5, 1\)"),
        (lambda output, target: 0.0, "must return a tensor.* not float"),
        (lambda output, target: LOSS(output, target) - LOSS(output, target).mean(), "the loss function mixes records"),
        (lambda output, target: LOSS(output, target) / 0, "the loss is inf before the first step"),
        (lambda output, target: LOSS(output, target) * torch.nan, "the loss is nan before the first step"),
    ],
)
def test_losses(loss_fn: Any, message: str) -> None:
    refused(ModelRefused, message, loss_fn=loss_fn)


# --- layers and parameters ------------------------------------------------------------------------------------------------
def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


class TiedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.first(x)), self.first.weight.t()))


def shared() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Sequential(layer), nn.Sequential(layer), nn.Linear(6, 3))


def sparse() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3), nn.PReLU())
    model[1].weight = nn.Parameter(torch.ones(1).to_sparse())
    return model


def broken() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].bias.data[1] = torch.nan
    return model


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3)).requires_grad_(False)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.head, self.spare = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.spare.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.again(x)))


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.ReLU()), r"the model \(Sequential\) has no parameter to train"),
        (frozen(), r"the model \(Sequential\) has no parameter to train"),
        (tied(), r"parameter 'weight' of '2' \(Linear\) is tied to '0' \(Linear\)"),
        (TiedByHand(), r"weights of 'first' \(Linear\) are used outside of it"),
        (shared(), r"'1.0' \(Linear\) is tied to '0.0' \(Linear\)"),
        (sparse(), r"parameter 'weight' of '1' \(PReLU\) is sparse"),
        (broken(), r"parameter 'bias' of '0' \(Linear\) holds NaN"),
        (nn.Sequential(nn.LazyLinear(3)), r"parameter 'weight' of '0' \(LazyLinear\) has no shape yet"),
        (nn.Sequential(nn.Linear(6, 3, dtype=torch.bfloat16)), "'0.weight' is of type torch.bfloat16"),
        (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3).double()), "must share one device and type"),
        (Twice(), r"'again' \(Linear\) is called 2 times"),
        (Spare(), r"'spare' \(Linear\) has trained parameters, but the forward pass never calls it"),
    ],
)
def test_models(model: nn.Module, message: str) -> None:
    for replay in ("auto", "hook"):
        refused(ModelRefused, message, model, replay=replay)


@pytest.mark.parametrize(("option", "message"), [({"sparse": True}, "sparse gradients"), ({"max_norm": 1.0}, "max_norm")])
def test_embeddings(option: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, **option), nn.Flatten(), nn.Linear(18, 3))
    refused(ModelRefused, rf"'0' \(Embedding\).*{message}", model)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.first(x)).float()


@pytest.mark.filterwarnings("ignore:running whole forward passes")
def test_half_precision_inside_the_model_is_refused() -> None:
    refused(ModelRefused, r"'first' \(Linear\) sees or returns values of type torch.bfloat16", Mixed())


# --- what does not run ----------------------------------------------------------------------------------------------------
def test_what_does_not_run_at_all_is_told_with_shapes() -> None:
    narrow, loss = nn.Sequential(nn.Linear(7, 3)), nn.BCEWithLogitsLoss(reduction="none")
    refused(ModelRefused, r"model does not run on inputs like the data's, torch.float32 of shape \(2, 6\): mat1", narrow)
    message = r"loss function does not take the model's output, torch.float32 of shape \(2, 3\), with targets"
    refused(ModelRefused, message, loss_fn=loss)
