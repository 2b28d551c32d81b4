"""Records that reach each other by ways that few small batches without randomness would not show."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpulr.errors import ModelRefused
from dpulr.model.prepare import prepare
from dpulr.model.replay import TracedPasses
from dpulr.model.row_independence import check_rows
from tests.support.core import CPU, LOSS, engine, points

EXAMPLE = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))


class Between(nn.Module):
    """Two linear layers and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.between = nn.Linear(6, 4), nn.Linear(4, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


def signs(x: Tensor) -> Tensor:
    """Each record's sign by its place in the batch."""
    return x * (1 - 2 * (torch.arange(len(x)) % 2)).view(-1, 1)


# --- randomness does not switch the check off -----------------------------------------------------------------------------
RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "functional dropout": lambda h: F.dropout(h, 0.1),
    "module": nn.Dropout(0.1),
    "noise": lambda h: h + 0.1 * torch.randn_like(h),
    "gumbel": lambda h: F.gumbel_softmax(h),
    "uniform": lambda h: h + torch.rand(len(h), 1),
    "variational": lambda h: h + torch.exp(0.5 * h) * torch.randn(h.shape),
    "common to all": lambda h: h * torch.rand(()),
    "sampled": lambda h: F.one_hot(torch.multinomial(h.softmax(1), 1).squeeze(1), 4).float() + h,
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_model_is_accepted(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="running whole forward passes")  # random numbers of a size that is not traced
        assert not prepare(Between(RANDOM[name]), LOSS, EXAMPLE, CPU).recordwise


def test_functional_dropout_is_traced() -> None:
    assert isinstance(prepare(Between(RANDOM["functional dropout"]), LOSS, EXAMPLE, CPU).passes, TracedPasses)


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_model_that_mixes_records_is_refused(name: str) -> None:
    draw = RANDOM[name]
    with pytest.raises(ModelRefused, match="before 'second' mixes records: a record's value changes with its place"):
        prepare(Between(lambda h: signs(draw(h))), LOSS, EXAMPLE, CPU)
    with pytest.raises(ModelRefused, match="the loss function mixes records: a record's value changes with its place"):
        prepare(Between(draw), lambda output, y: LOSS(output, y) / len(y), EXAMPLE, CPU)
    with pytest.raises(ModelRefused, match="before 'second' mixes records: a record's value changes with the other records"):
        prepare(Between(lambda h: draw(h - h.mean(0))), LOSS, EXAMPLE, CPU)


def test_state_of_a_random_model_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return F.dropout(x, 0.5) * self.calls

    with pytest.raises(ModelRefused, match=r"'between' \(Counts\) keeps state"):
        prepare(Between(Counts()), LOSS, EXAMPLE, CPU)


def test_randomness_that_everybody_knows_is_refused() -> None:
    def seeded(h: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(h, 0.1)

    with pytest.raises(ModelRefused, match="sets the seed"):
        prepare(Between(seeded), LOSS, EXAMPLE, CPU)


def test_mixing_by_chance_is_refused() -> None:
    """A permutation of the records, drawn anew: mixup inside the model."""
    with pytest.raises(ModelRefused, match="mixes records"):
        prepare(Between(lambda h: h + 0.5 * h[torch.randperm(len(h))]), LOSS, EXAMPLE, CPU)


# --- large batches --------------------------------------------------------------------------------------------------------
class Capacity(nn.Module):
    """A mixture of experts in which each takes so many records and leaves out the rest: the last ones, or the least sure."""

    def __init__(self, *, surest: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.surest = nn.Linear(4, 3), surest
        self.experts = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        chance = self.gate(x).softmax(1)
        best, expert = chance.max(1)
        chosen = F.one_hot(expert, 3)
        order = (-best).argsort() if self.surest else torch.arange(len(x))
        rank = torch.zeros_like(chosen)
        rank[order] = chosen[order].cumsum(0)
        fits = (rank * chosen).sum(1) <= max(8, int(1.25 * len(x) / 3))
        return x + torch.einsum("nf,nfg->ng", x, self.experts[expert]) * fits.unsqueeze(1)


def larger_loss(output: Tensor, target: Tensor) -> Tensor:
    losses = LOSS(output, target)
    return losses if len(losses) < 16 else losses - losses.mean()


@pytest.mark.parametrize(
    ("between", "loss_fn", "message"),
    [
        (lambda h: h if len(h) <= 64 else h - h.mean(0), LOSS, "before 'second' mixes records"),
        (lambda h: h if len(h) <= 64 else 2 * h, LOSS, "before 'second' mixes records"),
        (lambda h: F.dropout(h, 0.1) if len(h) <= 64 else F.dropout(h - h.mean(0), 0.1), LOSS, "before 'second' mixes records"),
        (nn.Tanh(), larger_loss, "the loss function mixes records"),
        (Capacity(surest=False), LOSS, r"'between' \(Capacity\)|'between.gate'|before 'second' mixes records"),
        (Capacity(surest=True), LOSS, r"'between' \(Capacity\)|'between.gate'|before 'second' mixes records"),
    ],
    ids=["path", "factor", "random path", "loss", "capacity in order", "capacity of the surest"],
)
def test_what_only_large_batches_show_is_refused(between: Any, loss_fn: Any, message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        prepare(Between(between), loss_fn, EXAMPLE, CPU)


def test_the_large_batch_is_as_large_as_those_of_a_step() -> None:
    above = Between(lambda h: h if len(h) <= 1_000 else h - h.mean(0))
    assert engine(above, points(), batch_size=10).guarantee == "certified"  # 640 rows: no pass has more
    with pytest.raises(ModelRefused, match="before 'second' mixes records"):
        engine(above, points(), batch_size=20)


# --- records that most data have none of ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rare",
    [
        lambda x: x.isnan().any(),
        lambda x: x.isinf().any(),
        lambda x: (x == 0).all(1).any(),
        lambda x: x.amax() > 1e6,
        lambda x: x.amin() < -1e6,
    ],
    ids=["not a number", "infinite", "zeros", "huge", "negative"],
)
def test_a_rare_record_that_decides_over_others_is_refused(rare: Any) -> None:
    class Decides(Between):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.where(rare(x), -1.0, 1.0)

    with pytest.raises(ModelRefused, match="mixes records"):
        prepare(Decides(nn.Tanh()), LOSS, EXAMPLE, CPU)


def test_a_rare_label_or_word_that_decides_over_others_is_refused() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return LOSS(output, target) * torch.where((target == 2).any(), -1.0, 1.0)

    with pytest.raises(ModelRefused, match="the loss function mixes records"):
        prepare(Between(nn.Tanh()), loss, EXAMPLE, CPU)

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 3)

        def forward(self, words: Tensor) -> Tensor:
            return self.table(words).mean(1) * torch.where((words > 50).any(), -1.0, 1.0)

    with pytest.raises(ModelRefused, match="mixes records"):
        prepare(Decides(), LOSS, (torch.zeros(1, 4, dtype=torch.int64), EXAMPLE[1]), CPU)


def test_the_large_batch_is_as_large_as_asked_for() -> None:
    sizes: list[int] = []
    model = Between(lambda h: sizes.append(len(h)) or h)
    check_rows(model, LOSS, EXAMPLE, CPU)
    assert max(sizes) == 300
    sizes.clear()
    check_rows(model, LOSS, EXAMPLE, CPU, largest=40)
    assert max(sizes) == 40


def test_a_large_model_is_tried_with_fewer_records() -> None:
    """A million numbers per record, in each of some operations. No batch of more than a handful."""
    sizes: list[int] = []
    model = Between(lambda h: (sizes.append(len(h)), (h.repeat(1, 2**18) + 1)[:, :4])[1])
    check_rows(model, LOSS, EXAMPLE, CPU)
    assert max(sizes) == 5


# --- operators from outside -----------------------------------------------------------------------------------------------
@torch.library.custom_op("dpulr_tests::flip", mutates_args=())
def flip(x: Tensor) -> Tensor:
    """Reads values where no mode of torch sees it: a record of values larger than any tried turns the sign of all."""
    return -x if bool((x.abs() > 1e6).any()) else x.clone()


def test_operators_from_outside_run_on_one_record_at_a_time() -> None:
    with pytest.warns(UserWarning, match="records one by one.* calls dpulr_tests::flip, an operator from outside of torch"):
        forward = prepare(Between(torch.ops.dpulr_tests.flip), LOSS, EXAMPLE, CPU)
    assert forward.recordwise
    x, y = torch.full((1, 6), 0.1), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        alone = forward.passes.clean(x, y).losses
        beside = forward.passes.clean(torch.cat([x, torch.full((1, 6), 1e9)]), y.repeat(2)).losses
    assert alone[0] == beside[0]


def test_torch_s_own_quantised_operators_are_no_strangers() -> None:
    """A static scale: each record is rounded by itself."""

    def rounded(h: Tensor) -> Tensor:
        return torch.dequantize(torch.quantize_per_tensor(h, 0.1, 64, torch.quint8))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="running records one by one")
        assert not prepare(Between(rounded), LOSS, EXAMPLE, CPU).recordwise
