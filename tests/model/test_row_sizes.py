"""The sizes of passes: filled up to whole vectors of rows, in short memory too."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from dpulr.model.row_sizes import RowSizes, agreeing
from tests.support.core import engine, train


def where(agree: Callable[[Sequence[int]], bool]) -> Callable[[Sequence[int]], int]:
    """How many sizes, from the largest down, agree."""
    return lambda sizes: next((n for n in range(len(sizes), 0, -1) if agree(sizes[-n:])), 0)


def in_vectors(sizes: Sequence[int]) -> bool:
    """As matrix products are computed: the rows behind the last whole vector are rounded in another way."""
    return all(size % 16 == 0 for size in sizes)


@pytest.mark.parametrize(("most", "largest"), [(10_000, 2_208), (457, 448), (100, 96), (40, 32), (16, 16)])
def test_a_pass_has_whole_vectors_of_rows_however_many_fit(most: int, largest: int) -> None:
    rows = RowSizes(lambda: 2_000.0, most, where(in_vectors))
    assert (rows.largest, rows.alone) == (largest, False)


@pytest.mark.parametrize("most", [10_000, 1_500])
@pytest.mark.parametrize("last", [800, 896, 1_000, 1_024, 1_090, 1_152])
def test_where_the_arithmetic_changes_at_some_number_of_rows_the_sizes_above_it_are_taken(most: int, last: int) -> None:
    """Not the largest alone: a batch of 1,000 would be filled up to 1,152 rows, or 1,280."""
    rows = RowSizes(lambda: 1_000.0, most, where(lambda sizes: in_vectors(sizes) and len({size <= last for size in sizes}) == 1))
    assert rows.sizes == [size for size in range(896, 1_153, 32) if size > last or last == 1_152]


def test_records_go_alone_where_no_size_does() -> None:
    rows = RowSizes(lambda: 2_000.0, 10_000, lambda sizes: 0)
    assert (rows.largest, rows.alone) == (1, True)


@pytest.mark.parametrize(("most", "sizes"), [(76, [16, 32, 48, 64]), (457, [64 * i for i in range(1, 8)]), (100, [32, 64, 96])])
def test_where_a_batch_takes_several_passes_the_last_one_may_be_short(most: int, sizes: list[int]) -> None:
    """Else 250 records would take 320 rows, and 500 of them 512: two processes would not be twice as fast as one."""
    rows = RowSizes(lambda: 500.0 if most == 76 else 2_000.0, most, where(in_vectors))
    assert rows.sizes == sizes
    assert [rows.of(n) for n in (1, sizes[0] + 1, sizes[-1])] == [sizes[0], sizes[1], sizes[-1]]
    coarse = RowSizes(lambda: 2_000.0, most, where(lambda sizes: all(size == rows.largest for size in sizes)))
    assert coarse.sizes == sizes[-1:]


def test_fewer_rows_than_a_vector_are_one_size() -> None:
    rows = RowSizes(lambda: 2_000.0, 7, len)
    assert rows.sizes == [7]


@pytest.mark.parametrize("border", [0, 40, 72, 200])
def test_sizes_are_tried_from_the_largest_down(border: int) -> None:
    """A record's number has other last bits in passes of up to `border` rows. The more sizes, the fewer passes of each."""
    sizes, passes = [32, 64, 80, 96], Counter[int]()

    def numbers(batch: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        passes[len(batch[0])] += 1
        yield batch[0] + (1e-7 if len(batch[0]) <= border else 0.0)

    probe = torch.zeros(1, 3), torch.zeros(1)
    agree = agreeing(numbers, probe, sizes)
    assert agree == (len(sizes) if border > 96 else sum(size > border for size in sizes))
    passes[96] -= 1  # what the others are compared with
    assert all(passes[size] * size * agree >= 300 for size in sizes[-agree:])
    assert sum(passes.values()) < 20


class Placed(nn.Module):
    """Its last bits depend on the place of a row, too little for the check of row independence."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-7 * torch.arange(len(x), dtype=x.dtype).remainder(3).unsqueeze(1)


@pytest.mark.parametrize("mechanism", ["hidden-direction", "gradient"])
def test_a_model_whose_rows_do_not_agree_is_run_record_by_record_and_that_is_said(mechanism: str) -> None:
    private = engine(mechanism=mechanism, model=nn.Sequential(nn.Linear(4, 4), Placed(), nn.Linear(4, 3)))
    with pytest.warns(UserWarning, match="one by one, which is slow, because no number of rows"):
        train(private, 1)
    assert private.fitted.rows.alone
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(private, 1)  # it is said once
