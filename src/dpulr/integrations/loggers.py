"""TensorBoard and MLflow, fed with what is public: held-out figures, epsilon, learning rate, settings, the privacy statement.

What they must not log: training losses and accuracies, sizes of batches, gradients before the noise, records. The guarantee does
not cover them. So the loggers have no method for unprotected values: `--show-unprotected` never reaches them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dpulr.engine import PrivacyEngine
from dpulr.errors import UsageError

_NOT_FIGURES = ("step", "process")


class Log(Protocol):
    """Where public values go."""

    def begin(self, about: Mapping[str, Any]) -> None: ...
    def figures(self, values: Mapping[str, float], step: int) -> None: ...
    def end(self, statement: str) -> None: ...


def public_figures(engine: PrivacyEngine) -> dict[str, float]:
    """What a loop of your own may log after a step. Epsilon takes a moment to compute: ask for it now and then."""
    spent = engine.privacy_spent()
    rate = engine.optimizer.param_groups[0]["lr"]
    return {"learning_rate": float(rate), **({} if spent.epsilon is None else {"epsilon": spent.epsilon})}


class TensorBoard:
    """Event files in `folder`: `tensorboard --logdir folder`."""

    def __init__(self, folder: Path | str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def begin(self, about: Mapping[str, Any]) -> None:
        rows = "\n".join(f"| {name} | {value} |" for name, value in about.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def figures(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, statement: str) -> None:
        self._writer.add_text("privacy", statement)
        self._writer.close()


class Mlflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says; by default in the folder mlruns beside the run's."""

    def __init__(self, name: str, folder: Path | str = ".") -> None:
        import mlflow

        self._mlflow: Any = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no further package
            mlflow.set_tracking_uri((Path(folder).resolve() / "mlruns").as_uri())
        mlflow.start_run(run_name=name)

    def begin(self, about: Mapping[str, Any]) -> None:
        self._mlflow.log_params(dict(about))

    def figures(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def end(self, statement: str) -> None:
        self._mlflow.set_tag("privacy", statement)
        self._mlflow.end_run()


class Logged:
    """A view of a run (`runs.run.View`) that also feeds loggers; everything else is the view's own."""

    def __init__(self, view: Any, makers: Sequence[Callable[[], Log]]) -> None:
        self._view, self._makers = view, makers
        self._logs: list[Log] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def begin(self, about: Mapping[str, Any]) -> None:
        self._view.begin(about)
        self._logs = [make() for make in self._makers]  # the run's folder exists only now
        public = {name: value for name, value in about.items() if isinstance(value, str | int | float)}
        for log in self._logs:
            log.begin(public)

    def metrics(self, values: Mapping[str, Any]) -> None:
        self._view.metrics(values)
        figures = {name: float(value) for name, value in values.items() if _is_figure(name, value)}
        for log in self._logs:
            log.figures(figures, int(values["step"]))

    def result(self, result: Mapping[str, Any]) -> None:
        self._view.result(result)
        for log in self._logs:
            log.end(str(result.get("statement", "")))


def _is_figure(name: str, value: object) -> bool:
    return name not in _NOT_FIGURES and isinstance(value, int | float) and not isinstance(value, bool)


def makers_of(names: Sequence[str], folder: Path) -> list[Callable[[], Log]]:
    """By name: tensorboard, mlflow. What is unknown or not installed is said now."""
    makers: dict[str, Callable[[], Log]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard"),
        "mlflow": lambda: Mlflow(folder.name, folder.parent),
    }
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise UsageError(f"--log is {unknown[0]!r}; it must be one of {', '.join(makers)}.")
    for name in names:
        if find_spec(name) is None:
            raise UsageError(f"--log {name} needs a package that is not installed: pip install 'dpulr[logging]'.")
    return [makers[name] for name in names]
