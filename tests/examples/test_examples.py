"""Every example runs, at a small size, and what it says is checked."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.audit.randomness import Recording
from dpulr.mechanisms import registry
from dpulr.mechanisms.base import WITH_MARGIN
from dpulr.model import layers
from tests.support.small_cli import child_environment

FOLDER = Path(__file__).parents[2] / "examples"
LOSS = nn.CrossEntropyLoss(reduction="none")


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is forgotten after its test."""
    monkeypatch.setattr(sys.modules["dpulr.mechanisms.known"], "_REGISTERED", dict(registry()))
    monkeypatch.setattr(layers, "_RULES", dict(layers._RULES))


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example of this name as a module."""
    name = f"example_{request.param}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def use(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True)


def test_every_example_is_tested_here() -> None:
    text = Path(__file__).read_text()
    assert [path.stem for path in sorted(FOLDER.glob("*.py")) if f'@use("{path.stem}")' not in text] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_one_learns(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 100
    assert "What one learns: " in text.split('"""')[1]


# --- quickstart -----------------------------------------------------------------------------------------------------------
@use("quickstart")
@pytest.mark.slow
def test_quickstart_stays_within_its_budget(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    spent, accuracy = example.main(epochs=1 / 40)
    assert spent.guarantee == "certified"
    assert spent.steps == 3
    assert 0 < spent.epsilon <= 1
    assert 0 <= accuracy <= 1
    assert capsys.readouterr().out == f"{spent}\n{accuracy}\n"


# --- huggingface ----------------------------------------------------------------------------------------------------------
@use("huggingface")
@pytest.mark.slow
def test_a_model_of_hugging_face_is_fine_tuned(example: ModuleType, tmp_path: Path) -> None:
    from tests.support.tiny_bert import save

    reviews = tmp_path / "reviews.csv"
    reviews.write_text("text,label\n" + "a very good film,1\na bad film,0\n" * 500)
    spent, accuracy = example.main(save(tmp_path), reviews, steps=2, tokens=8)
    assert spent.guarantee == "certified"
    assert 0 < spent.epsilon <= 3
    assert 0 <= accuracy <= 1


# --- people ---------------------------------------------------------------------------------------------------------------
@use("people")
@pytest.mark.slow
def test_people_are_protected_instead_of_records(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (records, _), (people, _) = example.main(epochs=1 / 20)
    assert (records.unit, people.unit) == ("record", "person")
    assert people.public_size < example.WRITERS + 1
    assert 0 < people.epsilon <= 3
    assert "one person with all of their records" in capsys.readouterr().out


# --- the literal step -----------------------------------------------------------------------------------------------------
@use("literal_step")
def test_the_library_takes_the_literal_step(example: ModuleType) -> None:
    """The same records, directions and noise give the same release, and the same gradients, up to the grid of the release."""
    torch.manual_seed(1)
    dataset = TensorDataset(torch.randn(60, 5), torch.randint(0, 3, (60,)))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    settings = dpulr.HiddenDirection(
        repeats=example.REPEATS, radius=example.RADIUS, layer_weights=(example.BOUND / WITH_MARGIN,) * 2, subspace=None
    )
    source, released = Recording(insecure_seed=3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dpulr.PrivacyEngine(
        model, optimizer, dataset, LOSS, mechanism=settings, batch_size=20, steps=2, noise_multiplier=0.7, randomness=source
    )
    engine.on_release(released.append)
    for step, (x, y) in enumerate(engine.batches()):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine.step(x, y)
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model.load_state_dict(before)
        z = directions(source.normals[step], {"0": 7, "2": 3}, example.REPEATS, engine.fitted.rows.of(len(x)))
        noise = per_parameter(source.noises[step], before)
        with torch.no_grad():
            wanted = example.literal_step(model, (x, y), z, noise, noise_std=0.7, size=20)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        literal = {name: g * 20 * example.mean_overlap(before[name].shape[0]) for name, g in wanted.items()}
        for name, values in per_parameter(released[step].values.numpy(), before).items():
            torch.testing.assert_close(values, literal[name], rtol=1e-5, atol=0.7 / 2**10)
        model.load_state_dict(after)
    assert len(released) == 2


def directions(normals: np.ndarray, dims: dict[str, int], repeats: int, records: int) -> dict[str, torch.Tensor]:
    """What the library drew, layer by layer, brought to length 1. Passes are filled up with rows that are nobody's."""
    assert len(normals) == repeats * records * sum(dims.values())
    parts = torch.from_numpy(normals).float().split([repeats * records * dim for dim in dims.values()])
    shaped = {name: part.view(repeats, records, dim) for part, (name, dim) in zip(parts, dims.items(), strict=True)}
    return {name: z / z.norm(dim=2, keepdim=True) for name, z in shaped.items()}


def per_parameter(flat: np.ndarray, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = torch.from_numpy(flat).float().split([parameter.numel() for parameter in like.values()])
    return {name: part.view_as(like[name]) for part, name in zip(parts, like, strict=True)}


@use("literal_step")
def test_the_literal_step_bounds_every_record(example: ModuleType) -> None:
    """Without noise, a step on one record adds at most the bound per layer, whatever the record."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    z = directions(np.random.default_rng(0).standard_normal(example.REPEATS * 8), {"0": 6, "2": 2}, example.REPEATS, 1)
    noise = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for scale in (1e-3, 1.0, 1e6):
        record = (scale * torch.randn(1, 4), torch.tensor([1]))
        with torch.no_grad():
            found = example.literal_step(model, record, z, noise, noise_std=1.0, size=1.0)
        for name, dim in (("0", 6), ("2", 2)):
            added = torch.cat([found[f"{name}.weight"].flatten(), found[f"{name}.bias"]]) * example.mean_overlap(dim)
            assert added.norm().item() <= example.BOUND * (1 + 1e-5)


@use("literal_step")
def test_the_literal_step_learns(example: ModuleType) -> None:
    """Half of the records are of each class. The generator is seeded: this can't fail by chance."""
    assert example.main(steps=12) > 0.75


# --- a layer of one's own -------------------------------------------------------------------------------------------------
@use("custom_layer")
@pytest.mark.parametrize(("records", "inputs", "outputs"), [(5, 3, 4), (1, 1, 1), (7, 6, 2)])
def test_the_rule_is_what_torch_finds(example: ModuleType, records: int, inputs: int, outputs: int) -> None:
    assert example.check(records, inputs, outputs) < 1e-12


@use("custom_layer")
def test_the_rule_moves_weights_as_the_layer_would(example: ModuleType) -> None:
    layer, x, delta = example.Quadratic(3, 4), torch.randn(2, 3), 0.1 * torch.randn(5, 2, 4, 6)
    with torch.no_grad():
        rule = layers.rule_for(layer, dict(layer.named_parameters()))
        moved = rule.with_weights(layers.Call((x,), {}, layer(x)), delta.flatten(2))
        wanted = torch.stack([torch.stack([layer.features(x[i]) @ (layer.weight + d[i]).t() for i in range(2)]) for d in delta])
    torch.testing.assert_close(moved, wanted)


@use("custom_layer")
@pytest.mark.slow
def test_the_layer_is_moved_at_its_output_and_learns(example: ModuleType) -> None:
    """Fresh noise: in 16 runs of this length the accuracy was 0.97 to 0.99."""
    engine, accuracy = example.main(steps=40)
    assert [(site.space, site.dim) for site in engine.forward.sites] == [("output", 8), ("output", 2)]
    assert engine.guarantee == "certified"
    assert accuracy > 0.7


# --- a mechanism of one's own ---------------------------------------------------------------------------------------------
@use("own_mechanism")
def test_votes_are_certified_by_name_and_learn(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Fresh noise: in 16 runs of this length the accuracy was 0.98 to 0.99."""
    engine, accuracy = example.main(steps=50)
    spent = engine.privacy_spent()
    priced = dpulr.accounting.gaussian_epsilon(
        noise_multiplier=engine.noise_multiplier, sample_rate=engine.sample_rate, steps=50, delta=1e-5
    )
    assert (spent.guarantee, spent.epsilon) == ("certified", priced)
    assert "of the votes mechanism" in capsys.readouterr().out
    assert accuracy > 0.7


@use("own_mechanism")
@pytest.mark.parametrize("value", [0.0, 1.0, 1e20, math.inf, math.nan])
def test_a_record_has_no_more_votes_than_the_noise_is_for(example: ModuleType, value: float) -> None:
    """One record, whatever it holds, moves the sum by at most the bound that the noise is a multiple of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    dataset = TensorDataset(torch.randn(10, 3), torch.zeros(10, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dpulr.PrivacyEngine(
        model, optimizer, dataset, LOSS, mechanism=example.Votes(repeats=6), batch_size=5, steps=1, noise_multiplier=2.0
    )
    fitted = engine.fitted
    with torch.inference_mode():
        public = fitted.draw_public(0)
        record = torch.full((1, 3), value), torch.tensor([1])
        added = fitted.sum_of_bounded_signals(record, public, engine._directions)
        nothing = fitted.sum_of_bounded_signals((record[0][:0], record[1][:0]), public, engine._directions)
    assert added.norm().item() <= fitted.noise_std / engine.noise_multiplier * (1 + 1e-6)
    assert added.shape == nothing.shape == (fitted.size,)
    assert not nothing.any()


# --- a black box ----------------------------------------------------------------------------------------------------------
@use("black_box")
@pytest.mark.slow
def test_the_layer_before_the_black_box_is_trained(example: ModuleType) -> None:
    """No gradient reaches it. Fresh noise: in 16 runs with it trained accuracies were 0.97 to 0.98, without it 0.56 to 0.59."""
    box = example.Nearest()
    assert not box(torch.randn(3, requires_grad=True)).requires_grad
    engine, accuracy = example.main(steps=60)
    assert engine.guarantee == "certified"
    assert accuracy > 0.8
    _, without = example.main(steps=60, train_first=False)
    assert without < 0.75


@pytest.mark.slow
@use("ray_train")
def test_ray_goes_on_after_a_worker_is_killed(example: ModuleType, tmp_path: Path) -> None:
    """A real local cluster, in processes of its own. One of two workers is killed in mid-training; all steps are charged once."""
    steps, mark = 60, f"DPULR_TEST={tmp_path}"
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"}
    environment = child_environment(**quiet, DPULR_TEST=str(tmp_path))
    command = [sys.executable, str(FOLDER / "ray_train.py"), "--folder", str(tmp_path / "run"), "--steps", str(steps)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        charged = tmp_path / "run" / "ledger.jsonl"
        while process.poll() is None and not (charged.exists() and charged.read_text().count('"kind": "step"') > 25):
            time.sleep(0.01)
        workers = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if is_worker(path, mark)]
        os.kill(max(workers), signal.SIGKILL)
        code = process.wait()
    said = (tmp_path / "log").read_text()
    assert code == 0, said[-3000:]
    assert len(workers) == 2
    assert said.count("Attempting to start training worker group") == 2  # the group was started again
    done = ast.literal_eval(said.rpartition("done: ")[2].splitlines()[0])
    assert done["steps"] == steps
    assert done["guarantee"] == "certified"
    assert done["epsilon"] <= 1.0
    assert charged.read_text().count('"kind": "step"') == steps
    kept = [path for path in (tmp_path / "run" / "training").glob("checkpoint_*") if path.is_dir()]
    assert 1 <= len(kept) <= 2  # the last one; that of the step in which the worker died may be left


def is_worker(cmdline: Path, mark: str) -> bool:
    """Whether it is one of this test's training processes."""
    try:
        return b"RayTrainWorker" in cmdline.read_bytes() and mark.encode() in (cmdline.parent / "environ").read_bytes()
    except OSError:
        return False


# --- beyond backpropagation -----------------------------------------------------------------------------------------------
BEYOND = ("adapter", "black_box", "counted_errors", "events", "forest", "quantised", "service", "spiking")


@pytest.mark.parametrize("name", BEYOND)
def test_an_example_beyond_backpropagation_fits_on_a_screen(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60


@use("adapter")
@pytest.mark.slow
def test_an_adapter_learns_for_a_model_that_one_can_only_call(example: ModuleType) -> None:
    """Fresh noise: with all 150 steps 0.957."""
    _, before, after = example.main(steps=60, repeats=4)
    assert before < 0.6
    assert after > before + 0.1


@use("forest")
@pytest.mark.slow
def test_a_layer_before_a_forest_learns(example: ModuleType) -> None:
    """Four classes; fresh noise: with 60 steps and 8 directions 0.785."""
    engine, accuracy = example.main(steps=25, repeats=4)
    assert engine.guarantee == "certified"
    assert accuracy > 0.35


@use("service")
@pytest.mark.slow
def test_a_service_in_the_middle(example: ModuleType) -> None:
    engine, accuracy = example.main(steps=8)
    assert engine.mechanism.exact == ("2",)
    assert accuracy > 0.4


@use("quantised")
@pytest.mark.slow
def test_binary_weights_behind_int8(example: ModuleType) -> None:
    engine, accuracy = example.main(steps=15, repeats=2)
    assert [site.space for site in engine.forward.sites] == ["output", "output"]
    assert accuracy > 0.5


@use("counted_errors")
@pytest.mark.slow
def test_errors_are_a_loss(example: ModuleType) -> None:
    engine, accuracy = example.main(epochs=1 / 20, repeats=1)
    assert engine.steps_taken == 3
    assert 0 < accuracy < 1


@use("spiking")
@pytest.mark.slow
def test_snntorch_on_mnist(example: ModuleType) -> None:
    engine, accuracy = example.main(epochs=1 / 100, repeats=1)
    assert [site.name for site in engine.forward.sites] == ["first", "last"]
    assert engine.mechanism.distances(2)[0] > 0.1
    assert 0 < accuracy < 1


@use("events")
@pytest.mark.slow
def test_events_are_made_of_each_picture_alone(example: ModuleType) -> None:
    images = dpulr.data.load("mnist")[0].tensors[0][:20]
    films = example.events(images)
    assert films.shape == (20, len(example.PATH) - 1, 1568)
    assert set(films.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(films[3:5], example.events(images[3:5]))
    assert not example.events(torch.full((1, 1, 28, 28), -1 / 3)).any()  # a black picture
    lighter, darker = films[:, :, :784].sum(), films[:, :, 784:].sum()
    assert 0.5 < float(lighter / darker) < 2
    engine, accuracy = example.main(records=1_000, epochs=1, repeats=1)
    assert engine.guarantee == "certified"
    assert 0 < accuracy < 1


# --- Lightning ------------------------------------------------------------------------------------------------------------
@use("lightning_mnist")
@pytest.mark.slow
def test_lightning_trains_and_says_what_was_spent(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy, own = example.main(steps=3, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)
    assert 0 <= accuracy <= 1
    assert own.engine.steps_taken == 3
    assert "differential privacy with epsilon" in capsys.readouterr().out
