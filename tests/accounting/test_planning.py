"""Planning: each quantity from the others, as a table and as JSON; the paper's settings; the figure's data."""

import json
import math

import pytest

from dpulr import accounting as acc
from dpulr.accounting.planning import main, plan
from reproduction import figure_bound
from reproduction import paper_epsilons as paper_settings

FULL = {"epsilon": 1.0, "noise_multiplier": 2.0, "batch_size": 500, "epochs": 10.0, "dataset_size": 60_000}


def without(name):
    return {key: value for key, value in FULL.items() if key != name}


def price(result, **change):
    given = {
        "noise_multiplier": result.noise_multiplier,
        "sample_rate": result.sample_rate,
        "steps": result.steps,
        "delta": result.delta,
        **change,
    }
    return acc.gaussian_epsilon(**given)


@pytest.mark.parametrize("name", ["epsilon", "noise_multiplier", "batch_size", "epochs", "dataset_size"])
def test_each_quantity_is_computed_from_the_rest(name):
    result = plan(**without(name))
    assert result.solved_for == name
    assert price(result) == result.epsilon
    for key, value in without(name).items():
        if key != "epsilon":
            assert getattr(result, key) == value
    if name != "epsilon":
        assert 0.98 < result.epsilon <= 1.0


def test_what_is_computed_is_extreme():
    batch = plan(**without("batch_size"))
    assert plan(**{**without("epsilon"), "batch_size": batch.batch_size + 1}).epsilon > 1.0
    size = plan(**without("dataset_size"))
    assert plan(**{**without("epsilon"), "dataset_size": size.dataset_size - 1}).epsilon > 1.0
    epochs = plan(**without("epochs"))
    assert price(epochs, steps=epochs.steps + 1) > 1.0


def test_delta_when_all_else_is_given():
    result = plan(**FULL)
    assert result.solved_for == "delta"
    assert price(result, delta=result.delta * 1.01) <= 1.0 <= price(result, delta=result.delta * 0.98)


def test_automatic_rejection():
    result = plan(**without("epsilon"), rejection_threshold="auto")
    assert 0 < result.rejection_threshold < 500
    plain = plan(**without("epsilon"))
    assert plain.epsilon <= result.epsilon <= 1.01 * plain.epsilon
    solved = plan(**without("noise_multiplier"), rejection_threshold="auto")
    assert solved.rejection_threshold > 0
    assert solved.epsilon <= 1.0


def test_hidden_direction_plan():
    result = plan(**without("epsilon"), mechanism="hidden-direction", dims=[32, 10], repeats=2)
    assert result.epsilon == acc.hidden_direction_epsilon(
        noise_multiplier=2.0, dims=[32, 10], repeats=2, sample_rate=1 / 120, steps=1200, delta=1e-5
    )
    assert result.equivalent_noise > 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": None, "epochs": None}, "only one of them"),
        ({"delta": 1e-5}, "Everything is given"),
        ({"batch_size": 70_000}, "batch_size exceeds"),
        ({"epsilon": -1.0}, "epsilon is -1"),
        ({"epochs": math.nan}, "epochs is nan"),
        ({"dataset_size": 1.5}, "dataset_size is 1.5"),
        ({"mechanism": "paper"}, "mechanism is 'paper'"),
        ({"dims": [10]}, "dims means nothing"),
    ],
)
def test_bad_plans(change, message):
    with pytest.raises(ValueError, match=message):
        plan(**{**FULL, **change})


def test_command_line(capsys):
    arguments = ["--noise-multiplier", "2", "--batch-size", "500", "--epochs", "10", "--dataset-size", "60000"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["epsilon"] == plan(**without("epsilon")).epsilon
    assert main(arguments) == 0
    assert "<- computed" in capsys.readouterr().out
    assert main([*arguments, "--mechanism", "hidden-direction", "--dims", "10", "4", "--repeats", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mechanism"] == "hidden-direction"
    with pytest.raises(SystemExit):
        main(["--epsilon", "1"])


def test_paper_settings_cover_all_fifteen():
    rows = paper_settings.paper_settings()
    assert [(row.batch_size, row.target_std) for row in rows] == [
        (batch, noise) for batch in (64, 200, 500) for noise in (0.5, 1.0, 2.0, 4.0, 8.0)
    ]
    for row in rows:
        assert bool(row.violated) == (row.target_std < 4)
        assert row.hidden < row.by_layer
        assert row.joint < row.by_layer
    assert rows[-5].joint == pytest.approx(18.59, rel=0.01)
    assert rows[-3].hidden == pytest.approx(0.269, rel=0.01)
    assert paper_settings.markdown(rows).count("\n") == 16


def test_figure_bound_points_and_picture(tmp_path):
    """The paper's example: N = 10,000, q = 0.01, N_B = 50 has an impairment below 1e-10 and a second term above 1e-6."""
    assert figure_bound.paper_ratio(0.01, 10_000, 50) * 2 * 0.01**2 * 1.1 / 16 < 1e-10
    points = figure_bound.bound_points(rates=[0.01, 0.1], sizes=[10_000, 100_000], shares=[0.5, 0.8, 0.95])
    assert len(points) == 12
    by_share = [point for point in points if point.sample_rate == 0.1 and point.dataset_size == 10_000]
    assert [p.paper_ratio for p in by_share] == sorted(p.paper_ratio for p in by_share)
    assert [p.epsilon_increase for p in by_share] == sorted(p.epsilon_increase for p in by_share)
    assert by_share[0].epsilon_increase < 1e-6
    figure_bound.draw(points, str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000
