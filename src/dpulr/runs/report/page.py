"""The page: guarantee first, then curves, then what it took, then the settings. No script, no network (report.html.j2)."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib import metadata

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpulr import __version__
from dpulr.accounting import privacy_spent
from dpulr.accounting.rounding import up
from dpulr.runs.report.charts import COLOURS, Axis, Series, bar_chart, line_chart
from dpulr.runs.report.gather import Points, RunData

_STEPS = Axis("step", lambda value: f"{value:,.0f}", from_zero=True, whole=True)
_PERCENT = Axis("", lambda value: f"{100 * value:.4g}%")
_PLAIN = Axis("", lambda value: f"{value:.4g}", from_zero=True)
BIBTEX = f"""@software{{dpulr,
  title   = {{dpulr: differentially private training of PyTorch models by forward passes alone}},
  author  = {{{{The dpulr maintainers}}}},
  year    = {{2026}},
  version = {{{__version__}}},
  note    = {{Python package dpulr}}
}}
@inproceedings{{feng2025forward,
  title     = {{Forward Learning with Differential Privacy}},
  author    = {{Feng, Mingqian and Zhang, Zeliang and Jiang, Jinyang and Peng, Yijie and Xu, Chenliang}},
  booktitle = {{International Conference on Machine Learning}},
  year      = {{2025}},
  eprint    = {{2504.00411}},
  archivePrefix = {{arXiv}}
}}"""
_PARTS = {"setup": "set-up", "checkpoint": "checkpoints"}


def page(runs: Sequence[RunData]) -> str:
    """The report of one run, or the comparison of several."""
    environment = Environment(loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined)
    shown: dict[str, object] = {"runs": runs, "curves": _curves(runs), "colours": COLOURS, "version": __version__}
    if len(runs) == 1:
        (run,) = runs
        shown |= {
            "title": run.name,
            "figures": _figures(run),
            "time": _time(run),
            "facts": _facts(run),
            "unprotected": line_chart("Training loss", [Series(run.name, run.unprotected, 3)], _STEPS, Axis("")),
            "settings": [(name, json.dumps(value)) for name, value in run.settings.to_dict().items()],
            "classes": _classes(run),
            "held_out": _held_out(run),
            "quote": quote(run),
            "bibtex": BIBTEX,
        }
    else:
        shown |= {
            "title": f"{len(runs)} runs compared",
            "results": [(run.name, _row(run)) for run in runs],
            "differences": _differences(runs),
            "joint": _joint(runs),
        }
    return environment.get_template("report.html.j2").render(shown)


def _row(run: RunData) -> dict[str, str]:
    return {
        "guarantee": run.spent.guarantee,
        "epsilon": _epsilon(run),
        "delta": f"{run.spent.delta:g}",
        "accuracy": _accuracy(run),
        "loss": _last(run.loss),
        "Brier score": _last(run.brier),
        "calibration error": _last(run.calibration_error),
        "steps": f"{run.ledger.steps:,}",
        "noise": f"{run.ledger.start.noise_multiplier:.4g}",
        "time": _duration(sum(run.seconds.values())),
        "state": run.status,
    }


def _figures(run: RunData) -> list[tuple[str, str]]:
    budget = "no budget" if run.ledger.budget is None else f"of {run.ledger.budget:g}"
    return [
        (_accuracy(run), "held-out accuracy"),
        (_last(run.loss), "held-out loss"),
        (_last(run.brier), "Brier score"),
        (_last(run.calibration_error), "expected calibration error"),
        (_epsilon(run), f"epsilon, {budget}"),
        *([(up(run.planned_epsilon), "epsilon of all planned steps")] if _stopped(run) and run.planned_epsilon is not None else []),
        (f"{run.spent.delta:g}", "delta"),
        (f"{run.ledger.steps:,}", f"of {run.ledger.planned_steps:,} steps, {run.status}"),
        (_duration(sum(run.seconds.values())), "in all"),
    ]


def _epsilon(run: RunData) -> str:
    if run.spent.guarantee == "nominal" and run.spent.nominal_epsilon is not None:
        return f"{up(run.spent.nominal_epsilon)} (nominal)"
    return "none" if run.spent.epsilon is None else up(run.spent.epsilon)


def _stopped(run: RunData) -> bool:
    """A stop that depends on what was seen is covered by the planned epsilon only."""
    return run.status != "done" and run.spent.epsilon is not None


def _accuracy(run: RunData) -> str:
    return "-" if run.last_accuracy is None else f"{run.last_accuracy:.2%}"


def _last(points: Points) -> str:
    return f"{points[-1][1]:.4f}" if points else "-"


def _curves(runs: Sequence[RunData]) -> list[tuple[str, Markup]]:
    budgets = sorted({run.ledger.budget for run in runs if run.ledger.budget is not None and run.epsilon})

    def lines(values: str) -> list[Series]:
        return [Series(run.name, getattr(run, values), i) for i, run in enumerate(runs)]

    epsilon = line_chart("Epsilon over steps", lines("epsilon"), _STEPS, _PLAIN, limits=[(f"budget {b:g}", b) for b in budgets])
    powers = Axis("delta", lambda value: f"{value:.0e}", log=True)
    return [
        ("Held-out accuracy", line_chart("Held-out accuracy over steps", lines("accuracy"), _STEPS, _PERCENT)),
        ("Held-out loss", line_chart("Held-out loss over steps", lines("loss"), _STEPS, _PLAIN)),
        ("Expected calibration error", line_chart("Calibration error over steps", lines("calibration_error"), _STEPS, _PERCENT)),
        ("Epsilon spent", epsilon),
        ("Privacy profile: epsilon for each delta", line_chart("Privacy profile", lines("profile"), powers, _PLAIN)),
    ]


def _time(run: RunData) -> Markup:
    parts = [(_PARTS.get(name, name), value) for name, value in sorted(run.seconds.items(), key=lambda item: -item[1])]
    return bar_chart("Where the time went", parts, _duration)


def _facts(run: RunData) -> list[tuple[str, str]]:
    result, start = run.result, run.ledger.start

    def count(name: str) -> str:
        return _whole(result.get(name))

    return [
        ("run", start.run),
        ("finished", str(result.get("finished", "-"))),
        ("training records", count("public_size")),
        ("a record", str(result.get("schema") or "-")),
        ("model", run.settings.model),
        ("folder", run.folder.name),
        ("noise multiplier", f"{start.noise_multiplier:.6g}"),
        ("sampling rate", ", ".join(f"{rate:.4g}" for rate in run.spent.sample_rates) or "-"),
        ("rejection threshold", str(start.rejection_threshold)),
        ("budget at the start", "none" if start.target_epsilon is None else f"{start.target_epsilon:g}"),
        ("budget now", "none" if run.ledger.budget is None else f"{run.ledger.budget:g}"),
        ("resumed", f"{run.ledger.resumes} times"),
        ("parameters", count("parameters")),
        ("passes of a batch", count("forward_passes")),
        ("processes", count("ranks")),
        ("bytes that each sends per step", count("bytes_per_step")),
        ("trained with dpulr", str(result.get("version", "-"))),
        ("torch", str(result.get("torch", "-"))),
        ("python", str(result.get("python", "-"))),
        ("report made with", f"dpulr {__version__}, python {platform.python_version()}, numpy {metadata.version('numpy')}"),
    ]


def _whole(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _classes(run: RunData) -> list[tuple[str, str, str, str]]:
    """Class by class, on the held-out data: records, recall, precision."""

    def share(value: object) -> str:
        return f"{value:.2%}" if isinstance(value, int | float) else "-"

    rows = run.result.get("test_classes")
    return [
        (str(row.get("class", "-")), _whole(row.get("records")), share(row.get("recall")), share(row.get("precision")))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]


def _held_out(run: RunData) -> str:
    if not run.accuracy and not run.loss:
        return "No held-out data was evaluated."
    if run.spent.evaluation_epsilon:
        return "The held-out records are private: accuracies have noise, and their cost is part of epsilon."
    return "The held-out data counts as public: epsilon does not cover it."


def quote(run: RunData) -> str:
    """The sentence for a paper."""
    spent = run.spent
    if spent.epsilon is None:
        return "There is no certified guarantee to be stated."
    tried = "settings that were tried on the same records are not covered"
    return (
        f"Trained with ({up(spent.epsilon)}, {spent.delta:g})-differential privacy, for adding or removing one {spent.unit}, by "
        f"{spent.steps:,} steps of the {spent.mechanism} mechanism on Poisson samples (rate "
        f"{', '.join(f'{rate:.4g}' for rate in spent.sample_rates)}, noise multiplier {run.ledger.start.noise_multiplier:.4g}), "
        f"accounted by dpulr {__version__}; {tried}."
    )


def _joint(runs: Sequence[RunData]) -> str:
    """What all runs together have cost, if their records are the same."""
    delta = min(run.spent.delta for run in runs)
    if any(run.spent.epsilon is None for run in runs):
        return "Joint epsilon, if the runs were trained on the same records: none, as not all of them have a guarantee."
    charges = [charge for run in runs for charge in run.ledger.charges]
    evaluations = sum(run.ledger.evaluation_epsilon for run in runs)
    spent = privacy_spent(charges, delta, evaluation_epsilon=evaluations)
    value = "none" if spent.epsilon is None else up(spent.epsilon)
    return (
        f"Joint epsilon, if the runs were trained on the same records: {value} at delta {delta:g}. Choosing the best of them costs "
        "that, not the epsilon of one."
    )


def _differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ, with their values."""
    texts = [{name: json.dumps(value, sort_keys=True) for name, value in run.settings.to_dict().items()} for run in runs]
    return [(name, [text[name] for text in texts]) for name in texts[0] if len({text[name] for text in texts}) > 1]


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
