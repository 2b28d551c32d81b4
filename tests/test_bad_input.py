"""What can't be trained privately is refused in a plain sentence that names the culprit, before any data is read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpulr

LOSS = nn.CrossEntropyLoss(reduction="none")


class Watched(Dataset[Any]):
    """40 records of 6 numbers with one of 3 labels. Notes which rows are read."""

    def __init__(self, labels: int = 3) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(40, 6)
        self.targets = torch.arange(40) % labels
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.reads.append(row)
        return self.x[row], self.targets[row]


def engine(model: nn.Module | None = None, loss_fn: Any = LOSS, data: Any = None, **settings: Any) -> dpulr.PrivacyEngine:
    model = nn.Sequential(nn.Linear(6, 3)) if model is None else model
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(parameters, lr=0.1)
    defaults: dict[str, Any] = {"mechanism": "gaussian", "batch_size": 8, "steps": 3, "noise_multiplier": 1.0}
    chosen = {name: value for name, value in {**defaults, **settings}.items() if value != "leave out"}
    return dpulr.PrivacyEngine(model, optimizer, Watched() if data is None else data, loss_fn, **chosen)


def refused(message: str, *args: Any, **settings: Any) -> None:
    data = settings.setdefault("data", Watched())
    with pytest.raises(ValueError, match=message):
        engine(*args, **settings)
    assert set(getattr(data, "reads", [])) <= {0}  # one item, for its shape


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
        refused(message, model, replay=replay)


@pytest.mark.parametrize("training", [True, False])
def test_batch_statistics_leave_no_trace(training: bool) -> None:
    """The check itself must not change the buffers; in eval mode, where nothing is mixed, BatchNorm is accepted."""
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).train(training)
    model[1].requires_grad_(False)
    before = [buffer.clone() for buffer in model.buffers()]
    if training:
        refused("BatchNorm1d", model)
    else:
        engine(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


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


def test_state_is_refused() -> None:
    refused("buffer 'seen' of the model .Counter. changes in the forward pass", Counter(shows=False))
    refused("keeps state", Counter(shows=True))


def scalar(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (nn.CrossEntropyLoss(), r"one value per record: for \d records it returned shape \(\)"),
        (scalar, "one value per record"),
        (lambda output, target: output, r"one value per record.*\(5, 3\)"),
        (lambda output, target: LOSS(output, target).unsqueeze(1), r"one value per record.*\(5, 1\)"),
        (lambda output, target: 0.0, "must return a tensor.* not float"),
        (lambda output, target: LOSS(output, target) - LOSS(output, target).mean(), "the loss function mixes records"),
        (lambda output, target: LOSS(output, target) / 0, "the loss is inf before the first step"),
        (lambda output, target: LOSS(output, target) * torch.nan, "the loss is nan before the first step"),
    ],
)
def test_losses(loss_fn: Any, message: str) -> None:
    refused(message, loss_fn=loss_fn)


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
        refused(message, model, replay=replay)


@pytest.mark.parametrize(("option", "message"), [({"sparse": True}, "sparse gradients"), ({"max_norm": 1.0}, "max_norm")])
def test_embeddings(option: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, **option), nn.Flatten(), nn.Linear(18, 3))
    refused(rf"'0' \(Embedding\).*{message}", model)


def test_mixing_of_tokens_is_seen() -> None:
    """One token a record: made-up tokens must differ, or a mean over records would not move."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    tokens = torch.utils.data.TensorDataset(torch.zeros(40, dtype=torch.int64), torch.arange(40) % 3)
    refused(r"'1' \(BatchNorm1d\) mixes records", model, data=tokens)


def test_optimizers() -> None:
    model, other = nn.Sequential(nn.Linear(6, 3)), nn.Linear(2, 2)
    refused(
        "holds a parameter of shape .2, 2. that is not the model's", model, optimizer=torch.optim.SGD(other.parameters(), lr=1.0)
    )
    refused("does not hold '0.bias'", model, optimizer=torch.optim.SGD([model[0].weight], lr=1.0))
    clone = nn.Sequential(nn.Linear(6, 3))
    refused("not the model's", model, optimizer=torch.optim.SGD([*model.parameters(), *clone.parameters()], lr=1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 41}, "batch_size is 41, but the data set has only 40 records"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": None}, "give batch_size"),
        ({"batch_size": 8, "sample_rate": 0.5}, "not both"),
        ({"batch_size": None, "expected_batch_size": 8, "sample_rate": 1.5}, "sample_rate is 1.5"),
        ({"batch_size": None, "expected_batch_size": -8, "sample_rate": 0.5}, "expected_batch_size is -8"),
        ({"epochs": 2}, "epochs or steps, not both"),
        ({"steps": None}, "give epochs or steps"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"steps": None, "epochs": -1}, "epochs is -1"),
        ({"noise_multiplier": None}, "give target_epsilon"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier is nan"),
        ({"target_epsilon": 0.0}, "target_epsilon is 0.0"),
        ({"target_epsilon": float("inf")}, "target_epsilon is inf"),
        ({"target_delta": 0.0}, "target_delta is 0.0"),
        ({"target_delta": 1.0}, "target_delta is 1.0"),
        ({"target_epsilon": 0.01, "noise_multiplier": 0.5}, "not one step fits.*target_epsilon=0.01"),
        ({"mechanism": "magic"}, "mechanism is 'magic'"),
        ({"sampling": "alphabetical"}, "sampling is 'alphabetical'"),
        ({"rejection_threshold": 30}, "rejection_threshold is 30"),
        ({"rejection_threshold": -1}, "rejection_threshold is -1"),
        (
            {"batch_size": None, "expected_batch_size": 8, "sample_rate": 0.2, "rejection_threshold": 4},
            "needs min_dataset_size",
        ),
        ({"min_dataset_size": 40}, "min_dataset_size is 40, but the data set has 40"),
        ({"replay": "magic"}, "replay is 'magic'"),
        ({"memory_limit": 10}, "memory_limit is 10"),
    ],
)
def test_settings(settings: dict[str, Any], message: str) -> None:
    refused(message, **settings)


def test_labels_out_of_range_are_named() -> None:
    refused(r"labels, from 0 to 4, with the model's output of shape \[\(3,\)\]", data=Watched(labels=5))
    wide = torch.utils.data.TensorDataset(torch.zeros(40, 6), torch.full((40,), -1))
    refused("labels, from -1 to -1", data=wide)


def test_settings_of_the_mechanism() -> None:
    for setting in ({"repeats": 0}, {"estimator": "guess"}, {"sigma": 0.0}, {"max_grad_norm": float("nan")}, {"clipping": "none"}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            dpulr.Gaussian(**setting)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer_weights"):
        dpulr.Gaussian(layer_weights=(1.0,))
    refused("layer_weights must be 1 positive numbers", mechanism=dpulr.Gaussian(clipping="per-layer", layer_weights=(1.0, 2.0)))


def test_checks_do_not_depend_on_private_values() -> None:
    """The same data set with other values is accepted or refused alike: only shapes and labels count."""
    data = Watched()
    data.x[:] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(data=data)
    assert data.reads == [0]


def test_what_does_not_run_at_all_is_told_with_shapes() -> None:
    refused(r"model does not run on inputs like the data's, torch.float32 of shape \(2, 6\): mat1", nn.Sequential(nn.Linear(7, 3)))
    loss = nn.BCEWithLogitsLoss(reduction="none")
    refused(r"loss function does not take the model's output, torch.float32 of shape \(2, 3\), with targets", loss_fn=loss)


def test_a_misspelt_space_is_refused() -> None:
    """Taken for a space of its own it would be bounded by one rule and released by another."""
    with pytest.raises(ValueError, match="space is 'weights'"):
        dpulr.Gaussian(space="weights")  # type: ignore[arg-type]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.first(x)).float()


def test_half_precision_inside_the_model_is_refused() -> None:
    refused(r"'first' \(Linear\) sees or returns values of type torch.bfloat16", Mixed())


def test_a_shared_sign_is_seen_whatever_the_initial_weights() -> None:
    """A sum over records changes its sign only if the others outweigh the rest."""
    for seed in range(20):
        torch.manual_seed(seed)
        refused("before 'second' mixes records", Functional(lambda h: torch.where(h.sum() > 0, h, -h)))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"batch_size": "20"}, "batch_size"),
        ({"batch_size": 8.5}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"epochs": "two", "steps": None}, "epochs"),
        ({"steps": math.inf}, "steps"),
        ({"noise_multiplier": "1"}, "noise_multiplier"),
        ({"target_epsilon": "1"}, "target_epsilon"),
        ({"target_delta": None}, "target_delta"),
        ({"memory_limit": "1 GB"}, "memory_limit"),
        ({"min_dataset_size": "7"}, "min_dataset_size"),
        ({"seed": -1}, "seed"),
        ({"insecure_noise_seed": 1.5}, "insecure_noise_seed"),
        ({"noise_multiplier": 0.0, "target_epsilon": 1.0}, "without noise"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind_are_named(settings: dict[str, Any], name: str) -> None:
    network = nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.zeros(20, 4), torch.zeros(20).long())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    defaults: dict[str, Any] = {"batch_size": 4, "steps": 2, "noise_multiplier": 1.0}
    with pytest.raises(ValueError, match=name):
        dpulr.PrivacyEngine(network, optimizer, data, nn.CrossEntropyLoss(reduction="none"), **{**defaults, **settings})


def test_optimizers_that_do_not_fit_are_named() -> None:
    network = nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.zeros(20, 4), torch.zeros(20).long())
    for optimizer, message in (("sgd", "torch optimizer"), (torch.optim.LBFGS(network.parameters()), "LBFGS")):
        with pytest.raises(ValueError, match=message):
            dpulr.PrivacyEngine(
                network, optimizer, data, nn.CrossEntropyLoss(reduction="none"), batch_size=4, steps=1, noise_multiplier=1.0
            )
    for settings in ({"subspace": 0}, {"subspace": True}, {"space": "weights"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            dpulr.Gaussian(**settings)
