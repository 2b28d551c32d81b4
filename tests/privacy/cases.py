"""What goes through the replay: mechanisms with their settings, models, data sets, and records that are odd in every way known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import dpulr
from dpulr.errors import InvalidArgument, ModelRefused
from tests.support import zoo
from tests.support.core import LOSS, all_kinds, mlp
from tests.support.own_mechanism import CoordinateDifferences
from tests.support.replaying import Replay, prepared_once

Item = Any
_HIDDEN, _EXACT = partial(dpulr.HiddenDirection, repeats=1), "exact"

MECHANISMS = [
    _HIDDEN(),
    _HIDDEN(repeats=3),
    _HIDDEN(antithetic=True),
    _HIDDEN(kappa=0.05),
    _HIDDEN(kappa=1e-6, antithetic=True, repeats=2),
    _HIDDEN(kappa="auto", groups=1),
    _HIDDEN(kappa="adaptive", repeats=2),
    _HIDDEN(kappa="adaptive", groups=2, space="weight", antithetic=True),
    _HIDDEN(kappa="adaptive", last_layer=_EXACT, quantile=0.3),
    _HIDDEN(groups=1),
    _HIDDEN(groups=1, antithetic=True, repeats=2),
    _HIDDEN(groups=2, space="weight"),
    _HIDDEN(last_layer=_EXACT),
    _HIDDEN(last_layer=_EXACT, groups=1, subspace=2),
    _HIDDEN(exact="auto"),
    _HIDDEN(exact="auto", repeats=2, antithetic=True, space="weight"),
    _HIDDEN(space="weight"),
    _HIDDEN(space="weight", subspace=None, repeats=2),
    _HIDDEN(subspace=2),
    _HIDDEN(subspace=None, repeats=2),
    _HIDDEN(radius=1e-3),
    dpulr.Gaussian(repeats=2),
    dpulr.Gaussian(repeats=1, estimator="likelihood-ratio"),
    dpulr.Gaussian(repeats=2, estimator="baseline", clipping="per-layer"),
    dpulr.Gaussian(repeats=2, clipping="per-layer", max_grad_norm=0.3),
    dpulr.Gaussian(repeats=2, space="weight", subspace=3),
    dpulr.Gaussian(repeats=3, subspace=2, estimator="baseline", max_grad_norm=1e-3),
    dpulr.Gradient(),
    dpulr.Gradient(clipping="per-layer", max_grad_norm=0.2),
    dpulr.Gradient(clipping="normalised"),
    dpulr.Gradient(max_grad_norm="adaptive"),
    dpulr.Gradient(max_grad_norm="adaptive", clipping="per-layer"),
    dpulr.ZerothOrder(repeats=2),
    dpulr.ZerothOrder(repeats=1, directions="sphere", max_grad_norm=0.1),
    dpulr.ZerothOrder(repeats=3, radius=0.1),
    dpulr.ZerothOrder(repeats=2, precision="bfloat16"),
    dpulr.ZerothOrder.dp_zo(noise="laplace", max_grad_norm=0.5),
    CoordinateDifferences(coordinates=2),
]
CHUNKS = (None, 1, 3)
"""How many records go through the model at once: all, or so many."""


# --- models -----------------------------------------------------------------------------------------------------------------
class Memory(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = _LastState(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.view(x.shape[0], 3, 2)))


class _LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


class FunctionalDropout(nn.Module):
    """Dropout that no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.3, training=True))


class Noisy(nn.Module):
    """Draws noise of its own, as a VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h + 0.1 * torch.randn_like(h))


class KeepsPositive(nn.Module):
    """Keeps the entries above zero: records of different lengths run alone, but can't be joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x > 0].view(len(x), -1, 1)
        return self.second(torch.tanh(self.first(kept)).mean(1))


class Scaled(nn.Module):
    """A layer of one's own that takes a Python number beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6) / 3)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return scale * F.linear(x, self.weight)


class OwnArguments(nn.Module):
    """Reads a value of the record and hands it to a layer as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, float(x[0, 0].sign()))


class Fails(nn.Module):
    """Raises for some values, in the middle of the model: also for some directions, and not for others."""

    def forward(self, x: Tensor) -> Tensor:
        if (x.numpy() > 1.5).any():
            raise RuntimeError(f"patient with {x.max()}")
        return x


class CalledAgain(nn.Module):
    """One layer, three calls: for some records their gradients nearly cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(x) - self.again(x.tanh()) + torch.tanh(self.again(-x)))


class Tied(nn.Module):
    """The embedding is the weight of a layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.last = nn.Embedding(7, 4), nn.Linear(4, 7), nn.Linear(7, 3)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.head(torch.tanh(self.table(words))).mean(1))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2, padding=1), nn.ReLU(), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(36, 3)
    )


@dataclass(frozen=True)
class Case:
    """A model and what its records look like: "points" of 6 numbers, "tokens" of 5 words out of 7, or "both" in a dict.

    random  it draws numbers of its own
    shared  its parameters are used several times, which `gradient` alone can bound
    """

    make: Callable[[], nn.Module]
    looks: str = "points"
    random: bool = False
    dtype: torch.dtype = torch.float32
    shared: bool = False


MODELS: dict[str, Case] = {
    "linear": Case(lambda: nn.Sequential(nn.Linear(6, 3))),
    "mlp": Case(mlp),
    "float64": Case(lambda: mlp().double(), dtype=torch.float64),
    "convolution": Case(conv),
    "all kinds": Case(all_kinds),
    "layer norm": Case(lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3))),
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3)), "tokens"),
    "two inputs": Case(zoo.TwoInputs, "both"),
    "gru": Case(zoo.Recurrent),
    "lstm": Case(Memory),
    "attention": Case(zoo.Attention),
    "residual": Case(zoo.Branches),
    "in place": Case(zoo.InPlace),
    "out of order": Case(zoo.OutOfOrder),
    "raises": Case(lambda: nn.Sequential(zoo.Refuses(), *mlp())),
    "raises inside": Case(lambda: nn.Sequential(nn.Linear(6, 5), Fails(), nn.Linear(5, 3))),
    "branch": Case(zoo.ValueBranch),
    "experts": Case(zoo.Experts),
    "keeps positive": Case(KeepsPositive),
    "own arguments": Case(OwnArguments),
    "box": Case(zoo.BoxInside),
    "black box": Case(
        lambda: nn.Sequential(nn.Linear(6, 5), dpulr.BlackBox(np.tanh, (5,), batch_size=4, pad=True), nn.Linear(5, 3))
    ),
    "binary": Case(lambda: nn.Sequential(zoo.Binary(6, 5), nn.Tanh(), zoo.Binary(5, 3))),
    "inline box": Case(zoo.InlineBox),
    "dropout": Case(lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.4), nn.Tanh(), nn.Linear(5, 3)), random=True),
    "functional dropout": Case(FunctionalDropout, random=True),
    "noisy": Case(Noisy, random=True),
    "called again": Case(CalledAgain, shared=True),
    "tied": Case(Tied, "tokens", shared=True),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].make()


# --- records ----------------------------------------------------------------------------------------------------------------
def ordinary(case: Case, rng: np.random.Generator) -> Item:
    points = torch.from_numpy(rng.standard_normal(6)).to(case.dtype)
    words = torch.from_numpy(rng.integers(0, 7, 5))
    target = int(rng.integers(3))
    inputs: Any = {"points": points, "tokens": words, "both": {"a": points[:4], "words": words[:3]}}[case.looks]
    return inputs, target


class Unreadable:
    """An item whose reading raises."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem


def odd_values(case: Case, rng: np.random.Generator) -> Item:
    """A record of the right shape and type: not finite, tiny, huge, all alike, mixed, or with a label that does not exist."""
    inputs, target = ordinary(case, rng)
    size = 10.0 ** rng.uniform(-44, 38.5)
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: x * size,
        lambda x: torch.full_like(x, size),
        lambda x: torch.full_like(x, -size),
        lambda x: torch.full_like(x, [np.nan, np.inf, -np.inf][rng.integers(3)]),
        lambda x: torch.where(
            torch.arange(x.numel()).view(x.shape) == rng.integers(x.numel()), [np.nan, np.inf, size][rng.integers(3)], x
        ),
        torch.zeros_like,
        lambda x: x * (10.0 ** torch.from_numpy(rng.uniform(-20, 20, x.shape))).to(x.dtype),
        lambda x: x,
    ]
    way = ways[rng.integers(len(ways))]
    limits = torch.finfo(case.dtype)
    change = lambda x: way(x).clamp(limits.min, limits.max) if rng.random() < 0.5 else way(x)  # noqa: E731
    if case.looks == "points":
        inputs = change(inputs).to(case.dtype)
    if case.looks == "both":
        inputs["a"] = change(inputs["a"]).to(case.dtype)
    if case.looks != "points" and rng.random() < 0.3:
        words = inputs if case.looks == "tokens" else inputs["words"]
        words[rng.integers(len(words))] = [7, -1, 10**9, -(2**62)][rng.integers(4)]
    if rng.random() < 0.3:
        target = [3, -1, -100, 10**12][rng.integers(4)]
    return inputs, target


def odd_kinds(case: Case, rng: np.random.Generator) -> Item:
    """A record of another type, shape or nesting, or one that can't be read at all."""
    inputs, target = ordinary(case, rng)
    types = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64]
    leaves: list[Callable[[Tensor], Any]] = [
        lambda x: x.to(types[rng.integers(len(types))]),
        lambda x: x[:-1],
        lambda x: torch.cat([x, x]),
        lambda x: x.unsqueeze(int(rng.integers(2))),
        lambda x: x[0],
        lambda x: x[:0],
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: float(x[0]),
        lambda x: None,
        lambda x: "patient 17",
        lambda x: {"x": x},
        lambda x: (x, x),
        lambda x: x.to_sparse(),
        lambda x: x.numpy().astype(object),
    ]
    targets: list[Any] = [
        1.0, np.float64(1), np.int32(1), True, torch.tensor(1), torch.tensor(1, dtype=torch.int32), torch.tensor(1.0),
        torch.tensor([1]), "1", None, (1,), 1j,
    ]  # fmt: skip
    problems: list[Exception] = [OSError("/data/patients/137.png"), KeyError(17), IndexError(), StopIteration(), ValueError("17")]
    pick = rng.random()
    if pick < 0.2:
        return Unreadable(problems[rng.integers(len(problems))])
    if pick < 0.3:
        return [inputs, (inputs, target, 1), None, (), "pair", {"x": inputs, "y": target}, 17][rng.integers(7)]
    if pick < 0.5:
        return inputs, targets[rng.integers(len(targets))]
    change = leaves[rng.integers(len(leaves))]
    if case.looks == "both":
        name = ["a", "words"][rng.integers(2)]
        changed = {**inputs, name: change(inputs[name])}
        return [changed, {name: inputs[name]}, {**inputs, "mask": torch.ones(5)}][rng.choice(3, p=[0.8, 0.1, 0.1])], target
    return change(inputs), target


# --- data sets --------------------------------------------------------------------------------------------------------------
class Items(Dataset[Any]):
    """Read item by item; some can't be."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Item:
        item = self.items[row]
        if isinstance(item, Unreadable):
            raise item.problem
        return item


class Fetched(Items):
    """Offers to read a whole batch at once."""

    def __getitems__(self, rows: list[int]) -> list[Item]:
        return [self[row] for row in rows]


def _tensors(items: Sequence[Item]) -> Dataset[Any]:
    return TensorDataset(torch.stack([item[0] for item in items]), torch.tensor([item[1] for item in items]))


def _within(items: Sequence[Item]) -> list[Item]:
    """The same with others between them, which no data set must show."""
    return [item for own in items for item in (items[0], own)]


def _as_numpy(item: Item) -> Item:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], Tensor):
        return item[0].numpy() if not item[0].is_sparse else item[0], item[1]
    return item


def _every_second(items: Sequence[Item]) -> range:
    return range(1, 2 * len(items), 2)


FITTING: dict[str, Callable[[Sequence[Item]], Any]] = {
    "tensors": _tensors,
    "subset of tensors": lambda items: Subset(_tensors(_within(items)), _every_second(items)),
}
"""For records that all have one shape and type."""

ANY: dict[str, Callable[[Sequence[Item]], Any]] = {
    "items": Items,
    "fetched": Fetched,
    "subset": lambda items: Subset(Items(_within(items)), _every_second(items)),
    "subset of fetched": lambda items: Subset(Fetched(_within(items)), _every_second(items)),
    "numpy": lambda items: Items([_as_numpy(item) for item in items]),
}


# --- pairs ------------------------------------------------------------------------------------------------------------------
class Pairs:
    """Pairs of neighbouring data sets for one model, and mechanisms tied to it. All is determined by the model's name and a number.

    few  so many mechanisms only, others for each model: tying them to it takes longer than some pairs
    """

    def __init__(self, name: str, *, few: int | None = None) -> None:
        self.name, self.case = name, MODELS[name]
        start, apart = (2 * list(MODELS).index(name), 19) if few else (0, 1)  # neighbours are alike: a model may refuse them all
        self.mechanisms = [(start + apart * i) % len(MECHANISMS) for i in range(few or len(MECHANISMS))]
        if self.case.shared:
            self.mechanisms = [i for i, mechanism in enumerate(MECHANISMS) if isinstance(mechanism, dpulr.Gradient)]
        self._replays: dict[int, Replay | None] = {}
        self._model, self._prepared = made(name), dict[Any, Any]()

    def replay(self, mechanism: int) -> Replay | None:
        """The mechanism of this number on the model; None if the engine refuses it."""
        if mechanism not in self._replays:
            self._replays[mechanism] = self._made(mechanism)
        return self._replays[mechanism]

    def _made(self, mechanism: int) -> Replay | None:
        example = Items([ordinary(self.case, np.random.default_rng(0))])
        model = made(self.name) if self.case.random else self._model
        try:
            with prepared_once(self._prepared):
                return Replay(MECHANISMS[mechanism], model, example, loss_fn=LOSS, random_model=self.case.random)
        except (InvalidArgument, ModelRefused):
            return None

    def draw(self, number: int) -> tuple[Replay, Any, Any, int, str]:
        """A replay, a data set, its neighbour, a seed for the order of the records, and what this is, in words."""
        rng = np.random.default_rng([number, *self.name.encode()])
        replay = None
        while replay is None:
            mechanism = self.mechanisms[rng.integers(len(self.mechanisms))]
            replay = self.replay(mechanism)
            if all(own in self._replays and self._replays[own] is None for own in self.mechanisms):  # else it would never end
                self.mechanisms = list(range(len(MECHANISMS)))
        chunk = CHUNKS[rng.integers(len(CHUNKS))]
        replay.in_parts_of(chunk)
        fitting = self.case.looks != "both" and rng.random() < 0.4
        kinds = FITTING if fitting else ANY
        kind = list(kinds)[rng.integers(len(kinds))]

        def some() -> Item:
            if fitting or rng.random() < 0.4:
                return odd_values(self.case, rng)
            return odd_kinds(self.case, rng)

        others = [ordinary(self.case, rng)]
        others += [ordinary(self.case, rng) if rng.random() < 0.7 else some() for _ in range(rng.integers(7))]
        own = some() if rng.random() < 0.85 else others[rng.integers(len(others))]
        place = 1 + int(rng.integers(len(others)))  # the first record gives the schema, which is public
        joined = [*others[:place], own, *others[place:]]
        what = f"{self.name}, pair {number}: {MECHANISMS[mechanism]}, chunk {chunk}, {kind}, record {own}"
        return replay, kinds[kind](others), kinds[kind](joined), number, what
