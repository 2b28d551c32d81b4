"""Records are read one by one to a public schema. One that can't be read, or does not fit, changes nothing for the others."""

from __future__ import annotations

import threading
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from dpulr.data import ArrayDataset
from dpulr.errors import DataError
from dpulr.model.batches import fill_room, followed_by
from dpulr.records import Records
from dpulr.schema import Leaf, Schema
from tests.support.core import CPU, engine


class Items(Dataset[Any]):
    """A list, and a note of every read. Functions in it are called: they stand for records that raise."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        assert type(row) is int
        self.reads.append(row)
        item = self.items[row]
        return item() if callable(item) else item

    def __getitems__(self, rows: list[int]) -> list[Any]:
        raise AssertionError("read as a batch")


def raising(problem: BaseException) -> Callable[[], Any]:
    def read() -> Any:
        raise problem

    return read


def same(a: Any, b: Any) -> bool:
    """The same containers, types, shapes and bits."""
    (left, form), (right, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    pairs = zip(left, right, strict=True)
    return form == other and all(
        p.dtype == q.dtype and p.shape == q.shape and p.numpy().tobytes() == q.numpy().tobytes() for p, q in pairs
    )


def every(data: Any, **settings: Any) -> Any:
    records = Records(data, CPU, **settings)
    return records.take(np.arange(records.size))


# --- what a batch is ------------------------------------------------------------------------------------------------------
class Point(NamedTuple):
    x: Any
    y: Any


def test_nested_items_become_nested_batches() -> None:
    items = [(({"a": np.ones(2) * i, "b": i}, (float(i), torch.full((3,), i))), i % 2) for i in range(5)]
    records = Records(Items(items), CPU)
    (mapping, pair), target = records.take(np.array([4, 1]))
    assert mapping["a"].tolist() == [[4, 4], [1, 1]]
    assert mapping["b"].tolist() == [4, 1]
    assert [part.tolist() for part in pair] == [[4.0, 1.0], [[4, 4, 4], [1, 1, 1]]]
    assert target.tolist() == [0, 1]
    assert str(records.schema) == (
        "({a: float64 of shape (2,), b: int64 of shape ()}, (float64 of shape (), int64 of shape (3,))) and int64 of shape ()"
    )
    (empty, _), target = records.take(np.array([], dtype=np.int64))
    assert empty["a"].shape == (0, 2)
    assert target.shape == (0,)


def test_containers_may_be_of_other_kinds() -> None:
    """Named tuples stay; a mapping of any kind and order is a dict, and a list is as good as a tuple."""
    items = [(Point(1.0, {"a": 1, "b": 2}), 0), [[1.0, UserDict({"b": 2, "a": 1})], 0]]
    inputs, _ = every(Items(items))
    assert isinstance(inputs, Point)
    assert inputs.y["a"].tolist() == [1, 1]


def test_items_are_read_only_when_drawn() -> None:
    data = Items([(torch.zeros(2) + i, 0) for i in range(100)])
    records = Records(data, CPU)
    assert data.reads == [0]  # for the schema
    records.take(np.array([7, 3]))
    assert data.reads == [0, 7, 3]
    data.reads.clear()
    assert same(Records(data, CPU, schema=(torch.ones(2), 5)).take(np.array([7, 3])), records.take(np.array([7, 3])))
    assert data.reads == [7, 3, 7, 3]


def test_the_example_has_the_schema_and_no_values() -> None:
    records = Records(Items([({"a": torch.full((2,), 7.0)}, 9)]), CPU)
    assert same(records.example, ({"a": torch.zeros(1, 2)}, torch.zeros(1, dtype=torch.int64)))


def test_tensors_are_indexed_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.arange(20.0).view(10, 2), torch.arange(10)
    plain = TensorDataset(x, y)
    for data, rows in ((plain, [9, 0]), (Subset(Subset(plain, [0, 2, 4, -4]), [3, 1]), [6, 2])):
        records = Records(data, CPU)
        with monkeypatch.context() as patch:
            patch.setattr(TensorDataset, "__getitem__", None)
            patch.setattr(Subset, "__getitem__", None)
            patch.setattr(Subset, "__getitems__", None)
            inputs, targets = records.take(np.array([len(data) - 1, 0])) if data is plain else records.take(np.array([0, 1]))
        assert targets.tolist() == rows
        assert torch.equal(inputs, x[rows])


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "list", "reused tensor", "reused array"])
def test_a_batch_is_a_copy(kind: str, odd: bool) -> None:
    """What is done to a batch in place must not reach the data; what the data set does to its buffer must not reach a batch."""
    x = torch.arange(8.0).view(4, 2)
    buffer, array = torch.zeros(2), np.zeros(2, dtype=np.float32)

    class Reusing(Items):
        def __getitem__(self, row: int) -> Any:
            buffer.copy_(x[row])
            array[:] = x[row].numpy()
            return buffer if kind == "reused tensor" else array, (float(row) if odd and row == 2 else row)

    data = {"tensors": TensorDataset(x, torch.arange(4)), "list": Items([(x[i], i) for i in range(4)])}.get(kind, Reusing([0] * 4))
    records = Records(data, CPU)
    for _ in range(2):
        inputs, targets = records.take(np.arange(4))
        assert inputs.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert targets.tolist() == [0, 1, 2, 3]
        inputs += 1
    assert x.sum() == 28


@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("kind", [list, dict])
def test_a_container_that_is_filled_again_and_again_mixes_no_records(kind: Any, thread_safe: bool) -> None:
    """Plain numbers in a list of the data set's own: all records would be the last one's."""
    own: Any = kind()

    class Refilling(Items):
        def __getitem__(self, row: int) -> Any:
            own.clear()
            own.extend([float(row), row + 0.5]) if kind is list else own.update(a=float(row), b=row + 0.5)
            return own, row

    data = Refilling([0] * 100)
    data.thread_safe = thread_safe
    records = Records(data, CPU)
    for _ in range(2):
        inputs, targets = records.take(np.arange(100))
        first, second = inputs if kind is list else (inputs["a"], inputs["b"])
        assert first.tolist() == targets.tolist() == list(range(100))
        assert torch.equal(second, first + 0.5)


# --- one odd record changes nothing for the others --------------------------------------------------------------------------
GOOD = [(torch.full((3,), float(i)), i) for i in range(6)]
ODD: dict[str, Any] = {
    "raises": raising(OSError("cannot identify image file '/data/patients/137.png'")),
    "raises StopIteration": raising(StopIteration()),
    "no values at all": (FakeTensorMode().from_tensor(torch.zeros(3)), 1),
    "memory": raising(MemoryError()),
    "shape": (torch.zeros(4), 1),
    "one more axis": (torch.zeros(1, 3), 1),
    "broadcasts": (torch.zeros(1), 1),
    "target of another shape": (torch.zeros(3), [1]),
    "half a label": (torch.zeros(3), 1.5),
    "label NaN": (torch.zeros(3), float("nan")),
    "label inf": (torch.zeros(3), float("inf")),
    "label too large": (torch.zeros(3), 2**63),
    "word": (torch.zeros(3), "1"),
    "numpy word": (torch.zeros(3), np.array("1")),
    "None": (torch.zeros(3), None),
    "no pair": torch.zeros(3),
    "three": (torch.zeros(3), 1, 1),
    "dict": ({"x": torch.zeros(3)}, 1),
    "sparse": (torch.zeros(3).to_sparse(), 1),
    "complex": (torch.full((3,), 1j), 1),
    "objects": (np.array([1, None, 2], dtype=object), 1),
}
FITTING: dict[str, Any] = {
    "float64": (torch.full((3,), 9.0, dtype=torch.float64), 9),
    "numpy float64": (np.full(3, 9.0), 9),
    "big-endian": (np.full(3, 9.0, dtype=">f8"), 9),
    "backwards": (np.full(3, 9.0, dtype=np.float32)[::-1], 9),
    "whole numbers": (torch.full((3,), 9), 9),
    "label 9.0": (torch.full((3,), 9.0), 9.0),
    "label of float32": (torch.full((3,), 9.0), torch.tensor(9.0)),
    "numpy label": (torch.full((3,), 9.0), np.uint8(9)),
    "real complex": (torch.full((3,), 9 + 0j), 9),
    "needs a gradient": (torch.full((3,), 9.0, requires_grad=True), 9),
    "read-only": (np.broadcast_to(np.float32(9.0), 3), 9),
    "parameter": (nn.Parameter(torch.full((3,), 9.0)), 9),
}


@pytest.mark.parametrize("place", [1, 6])
@pytest.mark.parametrize("name", ODD)
def test_a_record_that_does_not_fit_is_left_out_without_a_word(name: str, place: int, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        found = every(Items([*GOOD[:place], ODD[name], *GOOD[place:]]))
    assert same(found, every(Items(GOOD)))
    assert shown == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", FITTING)
def test_a_record_of_another_type_is_cast_alone(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = every(Items([*GOOD, FITTING[name]]))
    assert same(found, every(Items([*GOOD, (torch.full((3,), 9.0), 9)])))


def test_values_that_are_not_finite_stay() -> None:
    """The mechanism bounds them. 1e300 is infinite in float32."""
    inputs, _ = every(Items([(torch.zeros(2), 0), (np.array([np.nan, 1e300]), 0)]))
    assert torch.isnan(inputs[1, 0])
    assert torch.isposinf(inputs[1, 1])


def test_a_batch_without_any_good_record_is_empty() -> None:
    records = Records(Items([GOOD[0], ODD["raises"], ODD["shape"]]), CPU)
    for rows in ([1, 2], []):
        inputs, targets = records.take(np.array(rows, dtype=np.int64))
        assert (inputs.shape, inputs.dtype, targets.shape, targets.dtype) == ((0, 3), torch.float32, (0,), torch.int64)


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("thread_safe", [False, True])
def test_an_interrupt_passes(problem: BaseException, thread_safe: bool) -> None:
    data = Items([*GOOD * 20, raising(problem)])
    data.thread_safe = thread_safe
    with pytest.raises(type(problem)):
        every(data)


def test_a_warning_of_one_record_is_not_shown() -> None:
    def warns() -> Any:
        warnings.warn("corrupt EXIF data in 137.png", stacklevel=1)
        return GOOD[1]

    for action in ("always", "error"):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter(action)
            assert same(every(Items([GOOD[0], warns])), every(Items(GOOD[:2])))
        assert shown == []


def test_a_step_goes_on_with_the_others() -> None:
    """The engine's own sum, without noise: the odd record is as if it were not there."""
    sums = []
    for odd in (None, *(ODD[name] for name in ("raises", "shape", "half a label", "complex"))):
        data = Items([*[(torch.randn(3, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(20)]])
        if odd is not None:
            data.items.append(odd)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2))
        settings = {"sample_rate": 1.0, "expected_batch_size": 20, "batch_size": None}
        made = engine(model, data, mechanism="gradient", noise_multiplier=1e-9, steps=1, insecure_noise_seed=1, **settings)
        for inputs, targets in made.batches():
            assert len(targets) == 20
            made.step(inputs, targets)
        sums.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for other in sums[1:] for a, b in zip(sums[0], other, strict=True))


# --- any schema, any odd record -------------------------------------------------------------------------------------------
TYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
TREES = st.recursive(
    st.builds(Leaf, TYPES, SHAPES),
    lambda part: (
        st.lists(part, min_size=1, max_size=3).map(tuple)
        | st.lists(part, min_size=1, max_size=2)
        | st.dictionaries(st.sampled_from("abc"), part, min_size=1)
    ),
    max_leaves=4,
)


def filled(tree: Any, rng: np.random.Generator, change: Callable[[Tensor], Any]) -> Any:
    """Random values for a tree of leaves, each as whatever `change` makes of it."""
    if isinstance(tree, Leaf):
        whole = torch.from_numpy(rng.integers(0, 2, tree.shape))
        return change((whole if not tree.dtype.is_floating_point else whole + torch.randn(tree.shape)).to(tree.dtype))
    if isinstance(tree, dict):
        return {key: filled(part, rng, change) for key, part in tree.items()}
    return type(tree)(filled(part, rng, change) for part in tree)


def plain(value: Tensor) -> Any:
    return value


def as_numpy(value: Tensor) -> Any:
    return value if value.dtype is torch.bfloat16 else value.numpy()


def as_number(value: Tensor) -> Any:
    return value.item() if value.dim() == 0 else value


def wider(value: Tensor) -> Any:
    """The same values in a type that holds them."""
    return value.to(torch.float64 if value.is_floating_point() else torch.int64)


def longer(value: Tensor) -> Any:
    return torch.cat([value.unsqueeze(0)] * 2)


def junk(value: Tensor) -> Any:
    return object()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_batch_of_the_good_is_the_same_bit_for_bit(data: st.DataObject) -> None:
    inputs, target, seed = data.draw(TREES), data.draw(TREES), data.draw(st.integers(0, 2**32 - 1))
    schema, rng = Schema(inputs, target), np.random.default_rng(seed)
    torch.manual_seed(seed)
    good = [filled((inputs, target), rng, plain) for _ in range(data.draw(st.integers(0, 4)))]
    expected = [torch.stack(column) for column in zip(*map(pytree.tree_leaves, good), strict=True)] if good else None
    shown = [pytree.tree_map(data.draw(st.sampled_from([plain, as_numpy, as_number, wider])), record) for record in good]
    for _ in range(data.draw(st.integers(1, 2))):
        odd = filled((inputs, target), rng, data.draw(st.sampled_from([longer, junk])))
        odd = data.draw(st.sampled_from([odd, {}, (), (odd,), raising(ValueError()), [odd, odd, odd]]))
        shown.insert(data.draw(st.integers(0, len(shown))), odd)
    found = Records(Items(shown), CPU, schema=schema).take(np.arange(len(shown)))
    form = pytree.tree_structure(filled((inputs, target), rng, plain))
    leaves, own = pytree.tree_flatten(found)
    assert own == form
    assert [(leaf.dtype, tuple(leaf.shape[1:])) for leaf in leaves] == [(leaf.dtype, leaf.shape) for leaf in schema.leaves]
    if expected is None:
        assert all(len(leaf) == 0 for leaf in leaves)
    else:
        for leaf, wanted in zip(leaves, expected, strict=True):
            assert torch.equal(leaf.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


# --- never as a batch -----------------------------------------------------------------------------------------------------
class Padding(Items):
    """As a Hugging Face data set with a transform: asked for many, it pads to the longest of them."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.asked: list[int] = []

    def __getitem__(self, row: Any) -> Any:
        rows = [row] if isinstance(row, int) else row
        self.asked.append(len(rows))
        length = max(len(self.items[i][0]) for i in rows)
        items = [(nn.functional.pad(self.items[i][0], (0, length - len(self.items[i][0]))), self.items[i][1]) for i in rows]
        return items[0] if isinstance(row, int) else items

    def __getitems__(self, rows: list[int]) -> Any:
        return self[rows]


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, [3, 2, 1, 0]), lambda data: Subset(Subset(data, range(4)), (0, 1))]
)
def test_records_are_fetched_alone(wrap: Callable[[Any], Any]) -> None:
    """One long text must not change the padding of the others; it does not fit, and is left out."""
    data = Padding([(torch.ones(2), 0), (torch.ones(2), 1), (torch.ones(9), 2), (torch.ones(2), 3)])
    inputs, targets = every(wrap(data))
    assert inputs.shape[1] == 2
    assert 2 not in targets.tolist()
    assert set(data.asked) == {1}


def test_subsets_are_followed() -> None:
    data = Items([(torch.full((2,), i), i) for i in range(6)])
    for indices in ([5, 3, 1], (5, 3, 1), range(5, 0, -2), torch.tensor([5, 3, 1]), np.array([5, 3, 1])):
        _, targets = Records(Subset(data, indices), CPU).take(np.array([1, 0]))
        assert targets.tolist() == [3, 5]
    for behind in (data, TensorDataset(torch.zeros(6, 2), torch.arange(6))):
        _, targets = every(Subset(behind, [5, 77, 2.5, "3", -1, 3]))
        assert targets.tolist() == [5, 5, 3]


# --- threads --------------------------------------------------------------------------------------------------------------
def test_threads_read_only_where_the_data_set_allows_it() -> None:
    """A data set that shares a file's position between its reads would mix records."""
    seen: set[int] = set()

    class Slow(Items):
        def __getitem__(self, row: int) -> Any:
            seen.add(threading.get_ident())
            threading.Event().wait(0.0005)
            return super().__getitem__(row)

    items = [raising(OSError()) if i % 7 == 3 else (torch.full((2,), float(i)), i) for i in range(200)]
    careful, threaded = Slow(items), Slow(items)
    expected = every(careful)
    assert seen == {threading.get_ident()}
    threaded.thread_safe = True
    assert same(every(Subset(threaded, range(200))), expected)
    assert len(seen - {threading.get_ident()}) > 1


# --- arrays ---------------------------------------------------------------------------------------------------------------
def test_mapped_arrays_are_read_by_rows(tmp_path: Path) -> None:
    x = np.arange(60, dtype=">f4").reshape(20, 3)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    asked: list[Any] = []

    class Noted(np.memmap):
        def __getitem__(self, rows: Any) -> Any:
            asked.append(rows)
            return super().__getitem__(rows)

    y = np.arange(20, dtype=np.uint8)
    data = ArrayDataset({"a": mapped.view(Noted), "b": (y, y[::-1])}, y)
    records = Records(Subset(data, range(19, -1, -1)), CPU)
    assert str(records.schema) == "{a: float32 of shape (3,), b: (uint8 of shape (), uint8 of shape ())} and uint8 of shape ()"
    asked.clear()
    inputs, targets = records.take(np.array([12, 3, 17]))
    assert targets.tolist() == [7, 16, 2]
    assert inputs["a"].tolist() == x[[7, 16, 2]].tolist()
    assert inputs["b"][1].tolist() == [12, 3, 17]
    assert [rows.tolist() for rows in asked] == [[2, 7, 16]]
    assert data[4][0]["a"].tolist() == x[4].tolist()


def test_a_given_schema_casts_arrays_record_by_record() -> None:
    nothing = Records(TensorDataset(torch.zeros(3, 0), torch.zeros(3)), CPU, schema=(torch.zeros(0, dtype=torch.int64), 0.0))
    assert nothing.take(np.arange(3))[0].shape == (3, 0)
    y = np.array([0.0, 1.0, 1.5, np.nan, 4.0])
    data = ArrayDataset(np.arange(10.0).reshape(5, 2), y)
    for kind in (data, TensorDataset(torch.from_numpy(data.inputs), torch.from_numpy(y))):
        records = Records(kind, CPU, schema=(torch.zeros(2), 0))
        assert same(records.take(np.arange(5)), (torch.tensor([[0.0, 1], [2, 3], [8, 9]]), torch.tensor([0, 1, 4])))
        with pytest.raises(DataError, match=r"schema says float32 of shape \(3,\) and .* has float64 of shape \(2,\)"):
            Records(kind, CPU, schema=(torch.zeros(3), 0))


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (np.zeros((3, 2)), np.zeros(4), r"same number of rows; they have \[3, 4\]"),
        (np.array(["a"]), np.zeros(1), "arrays of numbers.*array of <U1"),
        ([1, 2], np.zeros(2), "not int"),
    ],
)
def test_arrays_that_are_no_records_are_named(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrayDataset(inputs, targets)


class Billion(Dataset[Any]):
    """A data set of 10^9 records that exists only on demand."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, row: int) -> Any:
        return torch.tensor([float(row % 1000)]), row % 10


def test_nothing_costs_time_or_memory_of_the_data_set(tmp_path: Path) -> None:
    """A mistake here does not end: it reads, or lists, 10^9 records."""
    column = np.memmap(tmp_path / "y", dtype=np.uint8, mode="w+", shape=(10**9,))  # a sparse file
    for data in (Billion(), ArrayDataset(column, column)):
        for view in (data, Subset(data, range(10**9)), Subset(Subset(data, range(0, 10**9, 2)), range(5 * 10**8))):
            records = Records(view, CPU)
            assert len(records.take(np.array([3, 499_999_999]))[1]) == 2


# --- refusals at the start ------------------------------------------------------------------------------------------------
class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Table(Items):
    iloc = None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), "Stream.* must be map-style"),
        (None, "NoneType.* must be map-style"),
        (DataLoader(Items([1])), "not a loader.*loader.dataset"),
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), "TensorDataset.* is empty"),
        (TensorDataset(torch.zeros(3, 2)), "TensorDataset.* must be a pair"),
        (Items([torch.zeros(2)] * 3), "Items.* must be a pair"),
        (Items([{"x": 1, "y": 2}]), "must be a pair.*dpulr.data.Columns"),
        (Items([("a text", 1)]), "in an item of the data set .Items. is of type str: a model takes tensors, arrays and numbers"),
        (Items([(1, None)]), "is of type NoneType"),
        (Items([(2**70, 1)]), "type int, which torch can't hold"),
        (Items([((), 1)]), "needs numbers in its inputs"),
        (Items([raising(OSError("patient 137"))]), "first record .*can't be read .OSError.*schema="),
        (Table([raising(KeyError(0))]), "KeyError.*ArrayDataset"),
    ],
)
def test_unusable_data_sets_are_named(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Records(data, CPU)
    assert "137" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_with_a_schema_the_first_record_does_not_matter() -> None:
    data = Items([ODD["raises"], *GOOD])
    assert same(every(data, schema=(np.zeros(3, np.float32), 0)), every(Items(GOOD)))
    assert same(every(data, schema=Records(Items(GOOD), CPU).schema), every(Items(GOOD)))


def test_words_in_a_given_schema_are_constants() -> None:
    items = [({"x": 1.0, "mode": "fast"}, 0), ({"x": 2.0, "mode": "slow"}, 0), ({"x": 3.0, "mode": "fast"}, 0)]
    inputs, _ = every(Items(items), schema=({"x": 0.0, "mode": "fast"}, 0))
    assert inputs["mode"] == "fast"
    assert inputs["x"].tolist() == [1, 3]


# --- room behind a batch --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [TensorDataset, ArrayDataset])
def test_what_fills_a_pass_up_is_written_behind_a_batch_and_not_into_the_data_set(kind: Any) -> None:
    x, y = torch.randn(50, 3), torch.arange(50)
    before = x.clone(), y.clone()
    batch = Records(kind(x, y) if kind is TensorDataset else kind(x.numpy(), y.numpy()), CPU).take(np.arange(5, 15))
    nobody = torch.full((1, 3), 7.0), torch.tensor([9])
    fill_room(batch, nobody, 6)
    for times in (6, 3):  # another number is copied
        whole = followed_by(batch, nobody, times)
        assert (whole[0].data_ptr() == batch[0].data_ptr()) == (times == 6)
        for part, own, filler in zip(whole, batch, nobody, strict=True):
            assert torch.equal(part, torch.cat([own, *[filler] * times]))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_a_batch_without_room_is_copied() -> None:
    whole = torch.arange(12.0).view(6, 2)
    batch, nobody = (whole[:2], torch.zeros(2)), (torch.ones(1, 2), torch.ones(1))
    fill_room(batch, nobody, 3)
    assert followed_by(batch, nobody, 3)[0].data_ptr() != whole.data_ptr()
    assert torch.equal(whole, torch.arange(12.0).view(6, 2))
