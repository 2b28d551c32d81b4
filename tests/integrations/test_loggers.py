"""TensorBoard and MLflow at their pinned versions: what is public is there, what is unprotected is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dpulr.integrations.loggers import public_figures
from tests.support.small_cli import SMALL, Ended
from tests.test_private_scores import trained


def test_tensorboard(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    ended = run_cli("train", *SMALL, "--steps", 6, "--show-unprotected", "--log", "tensorboard", "--out", folder)
    assert ended.code == 0, ended.err
    assert "training loss" in ended.out
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        *("test_accuracy", "test_loss", "test_brier", "test_calibration_error", "epsilon", "learning_rate")
    }
    assert [point.step for point in events.Scalars("epsilon")] == [2, 4, 6]
    assert events.Scalars("epsilon")[-1].value <= 2
    text = events.Tensors("privacy/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "differential privacy with epsilon" in text


def test_mlflow(tmp_path: Path, run_cli: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    ended = run_cli("train", *SMALL, "--steps", 6, "--log", "mlflow", "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    (run,) = MlflowClient((tmp_path / "mlruns").as_uri()).search_runs(["0"])
    assert run.info.run_name == "run"
    assert run.data.params["mechanism"] == "gaussian"
    assert "training_loss" not in run.data.metrics
    assert run.data.metrics["epsilon"] <= 2
    assert "differential privacy" in run.data.tags["privacy"]


def test_an_unknown_logger_is_refused_before_anything_is_spent(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    ended = run_cli("train", *SMALL, "--log", "paper", "--out", tmp_path / "run")
    assert (ended.code, (tmp_path / "run").exists()) == (2, False)
    assert "must be one of tensorboard, mlflow" in ended.err


def test_what_a_loop_of_ones_own_may_log() -> None:
    engine = trained()
    assert public_figures(engine) == {"learning_rate": 0.1, "epsilon": engine.privacy_spent().epsilon}
