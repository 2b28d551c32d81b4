"""Several real processes train one model: the same sum, the noise of one process, the same bits everywhere."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpulr
from dpulr.distributed import ranks
from dpulr.distributed.ranks import MOST_RANKS, Alone, digest_of, join
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.base import on_grid
from tests.support.core import all_kinds, blobs, engine, mlp, points, small_mlp, train
from tests.support.processes import on_ranks
from tests.support.replaying import Replaying

MECHANISMS = [
    dpulr.HiddenDirection(repeats=3),
    dpulr.HiddenDirection(repeats=2, exact="auto"),
    dpulr.HiddenDirection(repeats=2, last_layer="exact"),
    dpulr.HiddenDirection(repeats=2, subspace=2, antithetic=True, kappa=0.1),
    dpulr.HiddenDirection(repeats=1, groups=2),
    dpulr.HiddenDirection(repeats=1, kappa="adaptive"),
    dpulr.Gaussian(repeats=2, estimator="antithetic"),
    dpulr.Gaussian(repeats=2, clipping="per-layer"),
    dpulr.Gradient(),
    dpulr.Gradient(clipping="per-layer"),
    dpulr.Gradient(max_grad_norm="adaptive"),
    dpulr.ZerothOrder(),
]


# --- the sum --------------------------------------------------------------------------------------------------------------
def one_step(
    rank: int, model: Callable[[], nn.Module], mechanism: Any, shared_noise: bool, people: bool = False
) -> tuple[Tensor, str]:
    """All of 37 records in one step without noise, directions by record: what is released, and the parameters after it.

    They are those of 13 people, if people are protected.

    In float64: `zeroth-order` divides the rounding of a loss, which depends on the size of the batch, by its radius.
    """
    source = Replaying()
    batches: dict[str, Any] = {"sample_rate": 1.0, "expected_batch_size": 37.0}
    if people:
        batches |= {"unit": np.arange(37) // 3, "max_per_person": 3, "expected_batch_size": 13.0}
    private = engine(
        model().double(),
        points(37, dtype=torch.float64),
        mechanism=mechanism,
        noise_multiplier=1e-4,
        randomness=source,
        shared_noise=shared_noise,
        **batches,
    )
    source.follow(private)
    released: list[Tensor] = []
    private.on_release(lambda seen: released.append(seen.values))
    train(private, 1)
    return released[0], digest_of(private.model.parameters())


class Rounds(nn.Module):
    """Where no gradient comes through."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.round(8 * x) / 8


def hybrid() -> nn.Module:
    """Exact gradients behind the rounding, hidden directions before it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), Rounds(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(torch.tanh(self.first(x)))))


def all_steps(
    rank: int, model: Callable[[], nn.Module], mechanisms: list[Any], shared_noise: bool = True, people: bool = False
) -> Any:
    return [one_step(rank, model, mechanism, shared_noise, people) for mechanism in mechanisms]


SHARING, EXACT_TAIL = [dpulr.Gradient(), dpulr.Gradient(clipping="per-layer")], [dpulr.HiddenDirection(repeats=2, exact="auto")]
PEOPLE = [mechanism for mechanism in MECHANISMS if "adaptive" not in repr(mechanism)]  # who have several records each
SLOW = {"marks": pytest.mark.slow}


@pytest.mark.parametrize(
    ("size", "mechanisms"),
    [(2, [dpulr.HiddenDirection(repeats=3), dpulr.Gradient()]), pytest.param(3, PEOPLE, **SLOW), pytest.param(4, PEOPLE, **SLOW)],
)
def test_the_sum_over_people_is_that_of_one_process(size: int, mechanisms: list[Any]) -> None:
    found = on_ranks(size, all_steps, mlp, mechanisms, True, True)
    equal_to_one_process(found, all_steps(0, mlp, mechanisms, True, True))


@pytest.mark.parametrize(
    ("size", "model", "mechanisms", "shared_noise"),
    [
        pytest.param(3, mlp, MECHANISMS, True, **SLOW, id="3, all"),
        pytest.param(2, hybrid, EXACT_TAIL, True, id="2, hybrid"),
        pytest.param(2, Twice, SHARING, True, id="2, shared parameters"),
        pytest.param(3, mlp, MECHANISMS, False, **SLOW, id="3, all, noise by rank 0"),
        pytest.param(2, all_kinds, MECHANISMS, True, **SLOW, id="2, all kinds of layers"),
        pytest.param(4, all_kinds, MECHANISMS, True, **SLOW, id="4, all kinds of layers"),
        pytest.param(4, hybrid, MECHANISMS[:4], False, **SLOW, id="4, hybrid, noise by rank 0"),
        pytest.param(4, Twice, SHARING, True, **SLOW, id="4, shared parameters"),
    ],
)
def test_the_sum_over_ranks_is_that_of_one_process(
    size: int, model: Callable[[], nn.Module], mechanisms: list[Any], shared_noise: bool
) -> None:
    found = on_ranks(size, all_steps, model, mechanisms, shared_noise)
    equal_to_one_process(found, all_steps(0, model, mechanisms))


def equal_to_one_process(found: list[Any], alone: list[tuple[Tensor, str]]) -> None:
    """To 1e-6, for each mechanism; and all ranks to the last bit, with their parameters."""
    for i, (expected, _) in enumerate(alone):
        assert expected.norm() > 0.1
        assert (found[0][i][0] - expected).abs().max() < 1e-6 * max(1.0, float(expected.norm()))
        for other in found[1:]:
            assert torch.equal(other[i][0], found[0][i][0])
            assert other[i][1] == found[0][i][1]


def reduced(rank: int, mechanism: Any, **settings: Any) -> list[tuple[int, int]]:
    """The releases that a step reduces: how many numbers, and bytes."""
    private, sent, reduce = engine(mlp(), points(), mechanism=mechanism, **settings), [], dist.all_reduce

    def noted(tensor: Tensor, **options: Any) -> Any:
        if tensor.dtype in (torch.float64, torch.int32):
            sent.append((tensor.numel(), tensor.numel() * tensor.element_size()))
        return reduce(tensor, **options)

    dist.all_reduce = noted
    train(private, 1)
    told = private.ranks.bytes_sent(private.fitted.size, private.spacing)
    assert told == sent[0][1]  # in a ring of two: half of it there, half of it back
    return sent


def test_a_zeroth_order_step_sends_one_number_for_each_direction() -> None:
    assert on_ranks(2, reduced, dpulr.ZerothOrder(repeats=7)) == [[(7, 28)]] * 2
    assert on_ranks(2, reduced, dpulr.Gradient())[0] == [(53, 212)]
    subspaces = dpulr.HiddenDirection(repeats=1, subspace=2)
    assert on_ranks(2, reduced, subspaces)[0] == [(2 * 7 + 2 * 6, 104)]


def test_sums_that_31_bits_may_not_hold_are_sent_as_floats() -> None:
    assert on_ranks(2, functools.partial(reduced, noise_multiplier=1e-6), dpulr.Gradient())[0] == [(53, 424)]


# --- the noise ------------------------------------------------------------------------------------------------------------
def noise_alone(rank: int, numbers: int, shared_noise: bool = True) -> tuple[Tensor, list[Tensor]]:
    """What a step without records releases, and what this rank has noised for it."""
    side = math.isqrt(numbers)
    model = nn.Linear(side, side, bias=False)
    nn.init.zeros_(model.weight)
    data = TensorDataset(torch.zeros(10, side), torch.zeros(10, side))
    private = engine(
        model,
        data,
        loss_fn=lambda output, target: ((output - target) ** 2).sum(1),
        mechanism="gradient",
        sample_rate=1e-9,
        expected_batch_size=1.0,
        noise_multiplier=3.0,
        shared_noise=shared_noise,
    )
    shares: list[Tensor] = []
    privatise = private.fitted.privatise

    def noted(total: Tensor, noise: Tensor) -> Tensor:
        shares.append(privatise(total, noise).clone())
        return shares[-1].clone()

    private.fitted.privatise = noted  # type: ignore[method-assign]
    released: list[Tensor] = []
    private.on_release(lambda seen: released.append(seen.values))
    train(private, 1)
    return released[0], shares


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_noise_of_the_sum_is_that_of_one_process(size: int) -> None:
    """640,000 numbers: their variance lies within 1 % of the right one but once in 10^8 times (5.7 standard errors)."""
    found = on_ranks(size, noise_alone, 640_000)
    released = found[0][0]
    assert released.var().item() == pytest.approx(9.0, rel=0.01)
    assert abs(released.mean().item()) < 6 * 3 / 800
    for values, (share,) in found:
        assert torch.equal(values, released)
        assert share.var().item() == pytest.approx(9.0 / size, rel=0.01)
    shares = torch.stack([share for _, (share,) in found])
    assert torch.equal(shares.sum(0), released)  # exactly: all lie on one grid
    if size > 1:
        correlations = torch.corrcoef(shares) - torch.eye(size, dtype=torch.float64)
        assert correlations.abs().max() < 6 / 800


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_rank_0_alone_may_add_the_noise(size: int) -> None:
    """The same numbers, the same false-alarm rate. What it noises is on the grid of one process, and so is the release."""
    found = on_ranks(size, noise_alone, 640_000, False)
    released = found[0][0]
    assert released.var().item() == pytest.approx(9.0, rel=0.01)
    assert [len(noised) for _, noised in found] == [1] + [0] * (size - 1)
    assert torch.equal(found[0][1][0], released)
    assert all(torch.equal(values, released) for values, _ in found)
    assert torch.equal(on_grid(released.clone(), 3.0), released)


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 5, 16, 17, MOST_RANKS])
@pytest.mark.parametrize("noise", [0.7, 1.0, 3.3])
def test_the_grid_is_coarser_by_the_root_of_the_shares_or_the_next_power_of_two(shares: int, noise: float) -> None:
    values = on_grid(torch.linspace(0, noise, 40_001, dtype=torch.float64), noise, shares)
    spacing = values.unique().diff().min().item()
    alone = 2.0 ** (math.floor(math.log2(noise)) - 10)
    coarser = spacing / alone
    assert coarser == 2 ** round(math.log2(coarser))
    assert math.sqrt(shares) <= coarser < 2 * math.sqrt(shares) or shares == coarser == 1


# --- who has which records ------------------------------------------------------------------------------------------------
def test_ranks_of_one_data_set_have_disjoint_rows_that_make_up_all() -> None:
    found = on_ranks(3, rows_of_rank, 37)
    assert sorted(np.concatenate(found).tolist()) == list(range(37))


def rows_of_rank(rank: int, records: int) -> np.ndarray:
    return join().rows(dpulr.sampling.PoissonSampling(1.0), records, np.random.default_rng(0))


def test_every_record_is_sampled_at_the_public_rate() -> None:
    """2,000 steps at rate 0.2 on three ranks: each of 10 rows within 6 standard errors."""
    counts = sum(on_ranks(3, sampled_counts, 2000))
    assert np.abs(counts / 2000 - 0.2).max() < 6 * math.sqrt(0.2 * 0.8 / 2000)


def sampled_counts(rank: int, steps: int) -> np.ndarray:
    own, sampler, rng = join(), dpulr.sampling.PoissonSampling(0.2), np.random.default_rng(rank)
    return np.bincount(np.concatenate([own.rows(sampler, 10, rng) for _ in range(steps)]), minlength=10)


class Few(Dataset[Any]):
    """Items, so many of them."""

    def __init__(self, records: int) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.records:
            raise IndexError
        return torch.ones(4), index % 2


def uneven(rank: int, num_workers: list[int]) -> Any:
    """Shards of 0, 60 and 3 records: the first rank knows neither records nor what they look like."""
    shard = {"data": Few([0, 60, 3][rank]), "sharded": True, "num_workers": num_workers[rank]}
    private = engine(batch_size=7, steps=5, mechanism="gradient", **shard)
    assert private.records.size == [0, 60, 3][rank]
    train(private)
    return private.sample_rate, private.plan.public_size, private.ledger.steps, digest_of(private.model.parameters())


@pytest.mark.parametrize("num_workers", [[0, 0, 0], [1, 1, 0]])
def test_shards_may_be_uneven_and_empty(num_workers: list[int]) -> None:
    """Also where some read ahead and others do not: the empty shard never does."""
    found = on_ranks(3, uneven, num_workers)
    assert found == [found[0]] * 3
    assert found[0][:3] == (7 / 63, 63, 5)


# --- charges --------------------------------------------------------------------------------------------------------------
def same_program(rank: int, folder: Path) -> Any:
    private = engine(
        data=Watched(folder), mechanism="hidden-direction", steps=6, noise_multiplier=1.0, ledger=folder / "ledger.jsonl"
    )
    train(private)
    spent = private.privacy_spent()
    return spent.epsilon, spent.guarantee, private.steps_taken, digest_of(private.model.parameters()), private.ranks.seconds > 0


class Watched(Dataset[Any]):
    """Every record read says how many steps the ledger held on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: list[int] = []

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        ledger = self.folder / "ledger.jsonl"
        if ledger.exists():
            steps = ledger.read_text().count('"kind": "step"')
            with (self.folder / "reads").open("a") as file:
                file.write(f"{steps}\n")
        return blobs()[index]


def test_one_ledger_charges_each_step_once_before_any_rank_reads(tmp_path: Path) -> None:
    found = on_ranks(2, same_program, tmp_path)
    assert found[0] == found[1]
    alone = engine(mechanism="hidden-direction", steps=6)
    train(alone)
    assert found[0][:3] == (alone.privacy_spent().epsilon, "certified", 6)
    reads = [int(line) for line in (tmp_path / "reads").read_text().split()]
    assert min(reads) == 1
    assert max(reads) == 6
    assert (tmp_path / "ledger.jsonl").read_text().count('"kind": "step"') == 6


def readers_priorities(rank: int) -> list[int]:
    private = engine(steps=1)
    train(private)
    tasks = [path.parent for path in Path("/proc/self/task").glob("*/comm") if path.read_text().strip() == ranks._GLOO_READER]
    return [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists threads on Linux only")
def test_the_thread_that_reads_for_gloo_goes_last() -> None:
    """Where it shares a core with the thread whose lock it tries, both would wait. With another torch its name may have changed."""
    assert [set(found) for found in on_ranks(2, readers_priorities)] == [{19}, {19}]


def goes_on(rank: int, folder: Path) -> int:
    private = engine(steps=4, ledger=folder / "ledger.jsonl")
    train(private, 2)
    return private.ledger.steps


def test_a_ledger_on_disk_counts_on_all_ranks(tmp_path: Path) -> None:
    assert on_ranks(2, goes_on, tmp_path) == [2, 2]
    assert on_ranks(2, goes_on, tmp_path) == [4, 4]


def voided_on_one(rank: int) -> Any:
    private = engine(steps=3)
    train(private, 1)
    if rank == 1:
        with torch.no_grad():
            next(private.model.parameters()).add_(0.0)
    with pytest.warns(UserWarning, match="parameters were changed"):
        train(private, 1)
    return private.guarantee, len(private.ledger.charges)


def test_what_voids_the_guarantee_on_one_rank_voids_it_on_all() -> None:
    assert on_ranks(2, voided_on_one) == [("none", 2)] * 2


def in_a_group(rank: int, members: list[int]) -> Any:
    """Three processes, of which some train; the others do something else."""
    group = dist.new_group(members)
    if rank not in members:
        with pytest.raises(InvalidArgument, match="process_group"):
            engine(process_group=group)
        return "refused"
    private = engine(steps=3, process_group=group)
    train(private)
    return private.ranks.rank, private.ranks.size, private.ledger.steps, digest_of(private.model.parameters())


def test_a_group_of_some_processes_may_train() -> None:
    found = on_ranks(3, in_a_group, [1, 2])
    assert found[0] == "refused"
    assert [one[:3] for one in found[1:]] == [(0, 2, 3), (1, 2, 3)]
    assert found[1][3] == found[2][3]


def loaded(rank: int) -> Any:
    first = engine(steps=4)
    train(first, 2)
    second = engine(steps=4)
    second.load_state_dict(first.state_dict())
    train(second)
    return second.ledger.steps, digest_of(second.model.parameters())


def test_a_state_can_be_loaded_on_all_ranks() -> None:
    found = on_ranks(2, loaded)
    assert found[0] == found[1]
    assert found[0][0] == 4


# --- refusals -------------------------------------------------------------------------------------------------------------
def odd_one(rank: int, what: str) -> Any:
    odd, settings, model = rank == 1, {}, small_mlp()
    if what == "version of dpulr" and odd:
        dpulr.__version__ = "0.0.9"
    if what == "initial value of the parameters" and odd:
        model = dpulr.models.mlp((4, 8, 2), seed=1)
    if what == "model" and odd:
        model = nn.Sequential(nn.Linear(4, 2))
    if what == "data set" and odd:
        settings["data"] = TensorDataset(*[part.flip(0) for part in blobs().tensors])
    if what == "unit":
        settings |= {"unit": [row // (2 + odd) for row in range(200)], "max_per_person": 2, "mechanism": dpulr.Gradient()}
    if what == "records" and odd:
        settings["data"] = blobs(100)
    if what == "choice of trained parameters" and odd:
        next(model.parameters()).requires_grad_(False)
    if what == "loss function":
        settings["loss_fn"] = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1 * odd)
    if what == "weights":
        settings["weights"] = dpulr.class_weights([1.0, 0.5 - 0.1 * odd])
    changed = {
        "sharded": True,
        "parallel": "passes",
        "shared_noise": False,
        "seed": 1,
        "batch_size": 10,
        "steps": 5,
        "noise_multiplier": 2.0,
        "mechanism": dpulr.Gaussian(repeats=3),
    }
    if what in changed and odd:
        settings[what] = changed[what]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if what == "optimizer" and odd else 0.1)
    return engine(model, optimizer=optimizer, **settings)


def every_odd_one(rank: int, whats: list[str]) -> list[str]:
    found, version = [], dpulr.__version__
    for what in whats:
        try:
            odd_one(rank, what)
            found.append("accepted")
        except InvalidArgument as problem:
            found.append(str(problem))
        dpulr.__version__ = version
    return found


def test_ranks_that_were_started_differently_are_refused_by_name() -> None:
    whats = ["version of dpulr", "seed", "batch_size", "steps", "noise_multiplier", "mechanism", "model", "records", "data set"]
    whats += ["initial value of the parameters", "optimizer", "unit", "sharded", "parallel", "shared_noise"]
    whats += ["choice of trained parameters", "loss function", "weights"]
    found = on_ranks(2, every_odd_one, whats)
    assert found[0] == found[1]
    for what, said in zip(whats, found[0], strict=True):
        assert said.startswith(f"rank 1 was started with another {what}"), said


def of_three(rank: int) -> Any:
    return engine(seed=int(rank == 0))


def test_of_three_ranks_the_odd_one_is_named() -> None:
    said = on_ranks(3, of_three)[2].text
    assert said.startswith("rank 0 was started with another seed than rank 1: 1, not 0.")


NOT_SHARED: list[tuple[dict[str, Any], str]] = [
    ({"mechanism": "paper"}, "adds its noise in its own way"),
    ({"mechanism": dpulr.ZerothOrder(repeats=1, noise="laplace")}, "adds its noise in its own way"),
    ({"sampling": "shuffle"}, "must be 'poisson'"),
    ({"rejection_threshold": 3}, "no rank knows the size"),
    ({"unit": np.arange(200) // 2, "sharded": True, "mechanism": "gradient"}, "a person's records may lie on two ranks"),
]


def refusals(rank: int) -> list[str]:
    found = []
    for settings, _ in NOT_SHARED:
        with pytest.raises(InvalidArgument) as refused:
            engine(**settings)
        found.append(str(refused.value))
    return found


def test_what_ranks_cannot_share_is_refused() -> None:
    for found in on_ranks(2, refusals):
        for said, (_, expected) in zip(found, NOT_SHARED, strict=True):
            assert expected in said


def different_parameters(rank: int, after: int) -> Any:
    ranks.COMPARE_EVERY = 3
    private = engine(steps=8)
    train(private, after)
    with torch.no_grad():
        next(private.model.parameters()).add_(rank)
    private.parameters_changed(public=True)
    train(private)


@pytest.mark.parametrize(("after", "noticed"), [(0, 1), (1, 4), (4, 7)])
def test_ranks_whose_parameters_differ_do_not_step(after: int, noticed: int) -> None:
    """They are compared before the first step, and every three steps here."""
    for found in on_ranks(2, different_parameters, after):
        assert found.kind == "StepError"
        assert f"the ranks hold different parameters before step {noticed}: rank 0 has" in found.text


def different_steps(rank: int) -> Any:
    private = engine(steps=8)
    train(private, 2)
    if rank == 1:
        private.ledger.append(private.plan.event)
    train(private)


def test_ranks_that_have_taken_different_numbers_of_steps_take_no_other() -> None:
    for found in on_ranks(2, different_steps):
        assert found.kind == "StepError"
        assert "different numbers of steps: rank 0 has 2, rank 1 has 3." in found.text


def test_alone_nothing_changes() -> None:
    assert type(join()) is Alone
    with pytest.raises(InvalidArgument, match="sharded"):
        join(sharded=True)
