"""The page: guarantee first, then curves, then what it took, then the settings. No script, no network."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib import metadata

import dpulr
from dpulr.runs.numbers import up
from dpulr.runs.report.charts import COLOURS, Axis, Series, bar_chart, line_chart
from dpulr.runs.report.gather import RunData
from dpulr.runs.report.style import STYLE

_STEPS = Axis("step", lambda value: f"{value:,.0f}", from_zero=True)
_PARTS = {
    "setup": "set-up",
    "steps": "steps",
    "ledger": "ledger",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "unprotected": "unprotected",
}


def page(runs: Sequence[RunData]) -> str:
    """The report of one run, or the comparison of several."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = _single(runs[0]) if len(runs) == 1 else _several(runs)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - dpulr</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}</style></head>\n<body><main><header><h1>{escape(title)}</h1></header>\n{body}\n"
        f"<footer>Written by dpulr {escape(dpulr.__version__)}. What was spent is priced from the ledger.</footer>"
        "</main></body></html>\n"
    )


def _single(run: RunData) -> str:
    cards = [*_curves([run]), _card("Where the time went", _time(run)), _card("Run and versions", _facts(run))]
    blocks = [_guarantee(run), _figures(run), '<div class="cards">', *cards, "</div>"]
    if run.unprotected:
        chart = line_chart("Training loss", [Series(run.name, run.unprotected, 3)], _STEPS, Axis(""))
        note = "<p><strong>Not covered by the guarantee.</strong> It was stored because --show-unprotected was given.</p>"
        blocks.append(_card("Unprotected: training loss of the batches", note + chart, "warning"))
    return "\n".join([*blocks, _card("Settings", _settings(run))])


def _several(runs: Sequence[RunData]) -> str:
    heads = ("run", "guarantee", "epsilon", "delta", "accuracy", "loss", "steps", "noise", "time", "state")
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _row(i, run))}</tr>" for i, run in enumerate(runs))
    table = f'<div class="scroll"><table><tr>{"".join(f"<th>{h}</th>" for h in heads)}</tr>{rows}</table></div>'
    differing = _differences(runs)
    parts = [_card("Results", table), '<div class="cards">', *_curves(runs), "</div>", _card("Settings that differ", differing)]
    return "\n".join([*parts, *(_guarantee(run, run.name) for run in runs)])


def _row(index: int, run: RunData) -> list[str]:
    epsilon = "none" if run.spent.epsilon is None else up(run.spent.epsilon)
    return [
        f'<span class="key c{index % COLOURS}"></span>{escape(run.name)}',
        escape(run.spent.guarantee),
        epsilon,
        f"{run.spent.delta:g}",
        "-" if run.last_accuracy is None else f"{run.last_accuracy:.2%}",
        f"{run.loss[-1][1]:.4f}" if run.loss else "-",
        f"{run.ledger.steps:,}",
        f"{run.ledger.start.noise_multiplier:.4g}",
        _duration(sum(run.seconds.values())),
        escape(run.status),
    ]


def _guarantee(run: RunData, name: str = "") -> str:
    kind = {"certified": "good", "nominal": "warning", "none": "bad"}[run.spent.guarantee]
    head = f"<h2>{escape(name)}</h2>" if name else ""
    tag = f'<p class="tag">{escape(run.spent.guarantee)}</p>'
    return f'<section class="guarantee {kind}">{head}{tag}<p>{escape(str(run.spent))}</p></section>'


def _figures(run: RunData) -> str:
    epsilon = "none" if run.spent.epsilon is None else up(run.spent.epsilon)
    budget = "no budget" if run.ledger.budget is None else f"of {run.ledger.budget:g}"
    accuracy = "-" if run.last_accuracy is None else f"{run.last_accuracy:.2%}"
    figures = [
        (accuracy, "held-out accuracy"),
        (epsilon, f"epsilon, {budget}"),
        (f"{run.spent.delta:g}", "delta"),
        (f"{run.ledger.steps:,}", f"of {run.ledger.planned_steps:,} steps, {run.status}"),
        (_duration(sum(run.seconds.values())), "in all"),
    ]
    return (
        '<section class="figures">'
        + "".join(f"<div><b>{escape(v)}</b><span>{escape(n)}</span></div>" for v, n in figures)
        + "</section>"
    )


def _curves(runs: Sequence[RunData]) -> list[str]:
    legend = ""
    if len(runs) > 1:
        keys = "".join(f'<span><i class="key c{i % COLOURS}"></i>{escape(run.name)}</span>' for i, run in enumerate(runs))
        legend = f'<p class="legend">{keys}</p>'
    budgets = sorted({run.ledger.budget for run in runs if run.ledger.budget is not None and run.epsilon})
    percent = Axis("", lambda value: f"{value:.4g}" if value > 1 else f"{100 * value:.4g}%")
    plain = Axis("", lambda value: f"{value:.4g}", from_zero=True)

    def lines(values: str) -> list[Series]:
        return [Series(run.name, getattr(run, values), i) for i, run in enumerate(runs)]

    epsilon = line_chart("Epsilon over steps", lines("epsilon"), _STEPS, plain, limits=[(f"budget {b:g}", b) for b in budgets])
    powers = Axis("delta", lambda value: f"{value:.0e}", log=True)
    return [
        _card("Held-out accuracy", legend + line_chart("Held-out accuracy over steps", lines("accuracy"), _STEPS, percent)),
        _card("Held-out loss", legend + line_chart("Held-out loss over steps", lines("loss"), _STEPS, plain)),
        _card("Epsilon spent", legend + epsilon),
        _card("Privacy profile: epsilon for each delta", legend + line_chart("Privacy profile", lines("profile"), powers, plain)),
    ]


def _time(run: RunData) -> str:
    parts = [(_PARTS.get(name, name), value) for name, value in sorted(run.seconds.items(), key=lambda item: -item[1])]
    return bar_chart("Where the time went", parts, _duration)


def _settings(run: RunData) -> str:
    return _table([(name, json.dumps(value)) for name, value in asdict(run.settings).items()])


def _facts(run: RunData) -> str:
    result, start = run.result, run.ledger.start
    facts = [
        ("run", start.run),
        ("folder", run.folder.name),
        ("noise multiplier", f"{start.noise_multiplier:.6g}"),
        ("sampling rate", ", ".join(f"{rate:.4g}" for rate in run.spent.sample_rates) or "-"),
        ("rejection threshold", str(start.rejection_threshold)),
        ("budget at the start", "none" if start.target_epsilon is None else f"{start.target_epsilon:g}"),
        ("budget now", "none" if run.ledger.budget is None else f"{run.ledger.budget:g}"),
        ("resumed", f"{run.ledger.resumes} times"),
        ("parameters", f"{result['parameters']:,}" if isinstance(result.get("parameters"), int) else "-"),
        ("passes of a batch", f"{result['forward_passes']:,}" if isinstance(result.get("forward_passes"), int) else "-"),
        ("trained with dpulr", str(result.get("version", "-"))),
        ("torch", str(result.get("torch", "-"))),
        ("python", str(result.get("python", "-"))),
        ("report made with", f"dpulr {dpulr.__version__}, python {platform.python_version()}, numpy {metadata.version('numpy')}"),
    ]
    return _table(facts)


def _differences(runs: Sequence[RunData]) -> str:
    all_settings = [asdict(run.settings) for run in runs]
    names = [name for name in all_settings[0] if len({json.dumps(s[name], sort_keys=True) for s in all_settings}) > 1]
    if not names:
        return '<p class="quiet">None: the runs differ by chance only.</p>'
    head = "<tr><th></th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>"
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(json.dumps(s[name]))}</td>' for s in all_settings)}</tr>"
        for name in names
    )
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return (
        '<div class="scroll"><table>'
        + "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in rows)
        + "</table></div>"
    )


def _card(title: str, content: str, kind: str = "") -> str:
    return f'<section class="card {kind}"><h2>{escape(title)}</h2>{content}</section>'


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
