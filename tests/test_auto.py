"""Settings that choose themselves: public arithmetic, the same for the engine and the command line; what is given wins."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr import auto
from dpulr.accounting.events import HiddenDirectionRelease, HiddenSite
from dpulr.accounting.small_signal import hidden_direction_noise, likely_noise
from dpulr.auto import Layer, Task, choose
from dpulr.errors import InvalidArgument
from dpulr.parts.task import shapes
from dpulr.runs import Settings
from dpulr.runs.config_files import read_config
from dpulr.runs.training import Training, seconds_per_step
from reproduction import auto_fit


def layers_of(sizes: tuple[int, ...]) -> tuple[Layer, ...]:
    """The layers of a multi-layer perceptron of these sizes."""
    return tuple(Layer(a + 1, (a + 1) * b) for a, b in pairwise(sizes))


MLP = layers_of((784, 128, 64, 32, 10))
TASK = Task("gradient", 60_000, MLP, epochs=10)
LOSS = nn.CrossEntropyLoss(reduction="none")


def data(records: int = 2_000) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (records,), generator=generator)
    return TensorDataset(torch.randn(records, 6, generator=generator) + 2 * nn.functional.one_hot(labels, 6), labels)


def model() -> nn.Sequential:
    return dpulr.models.mlp((6, 8, 3), seed=0)


def test_it_needs_no_torch() -> None:
    program = "import sys, dpulr.auto; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.parametrize("mechanism", ["gradient", "hidden-direction", "gaussian", "zeroth-order"])
def test_choices_move_the_right_way(mechanism: str) -> None:
    """More noise, more steps or more inputs ask for a smaller rate; a larger budget can use more steps."""
    task = replace(TASK, mechanism=mechanism)
    rates = [choose(replace(task, epsilon=epsilon), batch_size=1_000, repeats=8).learning_rate for epsilon in (0.1, 0.5, 2, 8)]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 * rates[-1]
    long = [choose(replace(task, epochs=epochs), batch_size=1_000, repeats=8).learning_rate for epochs in (2, 10, 60)]
    assert long == sorted(long, reverse=True)
    if mechanism != "zeroth-order":  # there a wide layer's many parameters make the update shorter
        wide = choose(replace(task, layers=layers_of((7840, 128, 10))), batch_size=1_000, repeats=8).learning_rate
        assert wide < choose(replace(task, layers=layers_of((784, 128, 10))), batch_size=1_000, repeats=8).learning_rate
    steps = [choose(replace(task, epsilon=epsilon)).steps for epsilon in (0.1, 1, 8)]
    assert steps == sorted(steps)


def test_directions_are_paid_for_where_their_scatter_counts() -> None:
    """It counts beside little noise, among many records, in a short run."""
    task = replace(TASK, mechanism="hidden-direction", epochs=5)
    by_epsilon = [choose(replace(task, epsilon=epsilon)).repeats for epsilon in (0.1, 0.3, 1, 3, 8)]
    assert by_epsilon == sorted(by_epsilon)
    assert by_epsilon[0] == 4
    assert by_epsilon[-1] == 32
    assert choose(replace(task, epsilon=0.5, records=5_000)).repeats < choose(replace(task, epsilon=0.5)).repeats
    assert choose(replace(task, epsilon=0.5, epochs=60)).repeats < choose(replace(task, epsilon=0.5)).repeats


@pytest.mark.parametrize(("epsilon", "repeats"), [(0.5, 1), (8.0, 8)])
def test_the_noise_of_hidden_directions_is_near_what_a_plan_finds(epsilon: float, repeats: int) -> None:
    """Predicted by arithmetic, and calibrated by the accountant with the weights of the real layers."""
    engine = dpulr.PrivacyEngine(
        dpulr.models.mlp((6, 40, 30, 10)),
        "auto",
        data(),
        LOSS,
        mechanism=dpulr.HiddenDirection(repeats=repeats),
        batch_size=100,
        steps=100,
        target_epsilon=epsilon,
    )
    task = engine.task
    dims = [layer.dim(repeats) for layer in task.layers]
    assert dims == [site.dim for site in engine.mechanism.layout(engine.forward.sites).sites]  # type: ignore[attr-defined]
    noise = likely_noise(epsilon, 1e-5, 100 / 2_000, 100)
    predicted = auto._std_worth(noise, dims, repeats)
    even = HiddenDirectionRelease(tuple(HiddenSite(dim, predicted, repeats) for dim in dims))
    assert hidden_direction_noise(even) == pytest.approx(noise, rel=1e-9)
    assert predicted == pytest.approx(engine.noise_multiplier, rel=0.25)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1, 10, 100])
@pytest.mark.parametrize("records", [10, 455, 8_000, 10_000_000])
@pytest.mark.parametrize("length", [{"epochs": 0.5}, {"epochs": 60.0}, {"steps": 3}, {"steps": 100_000}, {}])
def test_choices_are_usable_everywhere(epsilon: float, records: int, length: dict[str, float]) -> None:
    for mechanism in ("gradient", "hidden-direction"):
        task = Task(mechanism, records, MLP, epsilon, 1e-7, **length)  # type: ignore[arg-type]
        found = choose(task)
        assert 1 <= found.batch_size <= records
        assert 0 < found.learning_rate < 1e3
        assert math.isfinite(found.learning_rate)
        assert 1 <= found.repeats <= 64
        assert found.steps >= 1
        assert 0 <= found.outlook <= 1
        assert all(sentence.endswith(".") for sentence in found.why.values())


def test_a_large_model_gets_few_directions() -> None:
    convolutions = (
        Layer(28, 224, 1024),
        Layer(73, 1_168, 1024),
        Layer(145, 4_640, 1024),
        Layer(289, 9_248, 1024),
        Layer(513, 5_130),
    )
    assert choose(Task("hidden-direction", 50_000, convolutions, 3.0, epochs=2)).repeats == 1
    assert choose(Task("hidden-direction", 60_000, MLP, 3.0, epochs=2)).repeats >= 8


@pytest.mark.slow
def test_the_engine_takes_it_and_what_is_given_wins() -> None:
    engine = dpulr.PrivacyEngine(model(), "auto", data(), LOSS, epochs=5, target_epsilon=2.0)
    wanted = choose(Task("hidden-direction", 2_000, shapes(engine.forward.sites), 2.0, 1e-5, 5))
    assert engine.choice == wanted
    assert engine.expected_batch_size == wanted.batch_size
    assert engine.mechanism.repeats == wanted.repeats
    assert set(engine.choice.why) == {"batch_size", "repeats", "learning_rate", "momentum", "schedule", "outlook"}
    rates = []
    for x, y in engine.batches():
        engine.step(x, y)
        rates.append(engine.optimizer.param_groups[0]["lr"])
    assert rates[0] == wanted.learning_rate
    assert rates == sorted(rates, reverse=True)
    assert engine.privacy_spent().guarantee == "certified"

    sgd = torch.optim.SGD((given := model()).parameters(), lr=0.123)
    mine = dpulr.PrivacyEngine(
        given, sgd, data(), LOSS, mechanism=dpulr.HiddenDirection(repeats=3), batch_size=77, steps=2, target_epsilon=2.0
    )
    for x, y in mine.batches():
        mine.step(x, y)
    assert (mine.expected_batch_size, mine.mechanism.repeats, sgd.param_groups[0]["lr"]) == (77, 3, 0.123)  # type: ignore[attr-defined]


def test_a_private_number_of_records_is_not_looked_at() -> None:
    engines = [
        dpulr.PrivacyEngine(
            model(), "auto", data(size), LOSS, expected_batch_size=100, sample_rate=0.05, steps=20, target_epsilon=1.0
        )
        for size in (1_900, 2_100)
    ]
    assert engines[0].choice == engines[1].choice
    assert engines[0].task.records == 2_000


def test_nothing_depends_on_what_records_hold() -> None:
    other = data()
    other.tensors[0].mul_(1e3)
    found = [dpulr.PrivacyEngine(model(), "auto", d, LOSS, epochs=5, target_epsilon=1.0).choice for d in (data(), other)]
    assert found[0] == found[1]


def test_the_command_line_and_the_engine_choose_alike() -> None:
    settings = Settings(epochs=3.0, target_epsilon=0.7)
    small = data(900)
    training = Training(settings, small, model())
    engine = dpulr.PrivacyEngine(model(), "auto", small, LOSS, epochs=3, target_epsilon=0.7)
    assert training.engine.choice == engine.choice
    assert training.settings.batch_size == engine.expected_batch_size
    assert training.settings.learning_rate == engine.choice.learning_rate
    again = Training(training.settings, small, model())  # as a resumed run does
    assert again.settings == training.settings


def test_a_time_budget_becomes_epochs() -> None:
    short, long = (Training(Settings(seconds=seconds, mechanism="gradient"), data(900), model()) for seconds in (0.05, 60.0))
    assert short.settings.seconds is None
    assert 0 < short.settings.epochs < long.settings.epochs <= 100
    assert seconds_per_step(long.engine) > 0


def test_a_hopeless_budget_is_said_before_it_is_spent() -> None:
    assert auto.outlook(replace(TASK, epsilon=1.0)) > 0.9
    assert auto.warnings_for(replace(TASK, epsilon=1.0)) == []
    (sentence,) = auto.warnings_for(Task("gradient", 1_500, MLP, 0.1))
    assert "no setting learns well" in sentence
    assert "%" in sentence
    with pytest.warns(UserWarning, match="no setting learns well"):
        dpulr.PrivacyEngine(model(), "auto", data(), LOSS, epochs=1, target_epsilon=1e-3)


def test_only_auto_is_a_word() -> None:
    with pytest.raises(InvalidArgument, match="optimizer is 'sgd'"):
        dpulr.PrivacyEngine(model(), "sgd", data(), LOSS, epochs=1, target_epsilon=1.0)  # type: ignore[arg-type]
    for name in ("batch_size", "learning_rate", "repeats"):
        with pytest.raises(InvalidArgument, match=name):
            Settings(**{name: "many"})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["linear", "deep", pytest.param("hidden", marks=pytest.mark.slow)])
def test_constants_are_those_that_the_study_finds(kind: str) -> None:
    """`python -m reproduction auto-fit --show` prints them."""
    assert auto.FITTED[kind] == auto_fit.fitted(kind)


def test_a_schedule_ends_at_zero() -> None:
    assert auto.scheduled(2.0, "cosine", 0.0) == 2.0
    assert np.isclose(auto.scheduled(2.0, "cosine", 1.0), 0)
    assert auto.scheduled(2.0, "constant", 0.7) == 2.0


def test_a_config_keeps_the_numbers(tmp_path: Path) -> None:
    text = Settings(learning_rate="0.25", batch_size="64").to_json()  # type: ignore[arg-type]
    path = tmp_path / "config.json"
    path.write_bytes(text)
    found = Settings.build(read_config(path))
    assert (found.learning_rate, found.batch_size, found.repeats) == (0.25, 64, "auto")
