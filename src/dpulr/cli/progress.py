"""What is shown while a command works: a live view in a terminal, plain lines elsewhere, JSON lines on request."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dpulr.accounting.rounding import up
from dpulr.accounting.statement import stopped_early
from dpulr.distributed.launch import rank


def make_view(*, as_json: bool) -> PlainView:
    if rank() > 0:
        return SilentView()
    if as_json:
        return JsonView()
    return LiveView() if sys.stdout.isatty() else PlainView()


@contextmanager
def logged(view: PlainView, names: Sequence[str] | None, folder: Path) -> Iterator[Any]:
    """The view, entered; and what is public also goes to these loggers."""
    with view:
        if not names or rank() > 0:
            yield view
            return
        from dpulr.integrations.loggers import Logged, makers_of

        yield Logged(view, makers_of(names, folder))


class PlainView:
    """Plain lines."""

    about: Mapping[str, Any]

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *problem: object) -> None:
        return None

    def note(self, text: str) -> None:
        self.line(f"{text} ...")

    def progress(self, what: str, done: int, total: int) -> None:
        """So much of something is done; a total of 0 is unknown. A line when it begins."""
        if what not in self._seen:
            self._seen.add(what)
            self.line(what)

    def begin(self, about: Mapping[str, Any]) -> None:
        self.about = about
        self.line(headline(about))
        for note in about.get("notes", ()):
            self.line(note)
        self.line(f"steps {about['steps_taken']} of {about['planned_steps']}; the run is in {about['folder']}")

    def step(self, step: int) -> None:
        return None

    def metrics(self, values: Mapping[str, Any]) -> None:
        figures = "".join(f"held-out {name} {text}   " for name, text in held_out(values))
        self.line(f"step {values['step']} of {self.about['planned_steps']}   {figures}{spent(values['epsilon'], self.about)}")

    def unprotected(self, values: Mapping[str, Any]) -> None:
        self.line(unprotected_line(values))

    def result(self, result: Mapping[str, Any]) -> None:
        self.end(result, *summary(result))

    def end(self, values: Mapping[str, Any], *lines: str) -> None:
        """What came of it: `values` for machines, `lines` for people."""
        for text in lines:
            self.line(text)

    def line(self, text: str) -> None:
        print(text, flush=True)


class SilentView(PlainView):
    """Nothing: of several processes one speaks."""

    def line(self, text: str) -> None:
        return None

    def result(self, result: Mapping[str, Any]) -> None:
        return None


class JsonView(PlainView):
    """One object per line; `event` says what it is."""

    def note(self, text: str) -> None:
        self.event("note", {"text": text})

    def progress(self, what: str, done: int, total: int) -> None:
        if what not in self._seen:
            self._seen.add(what)
            self.event("progress", {"what": what, "done": done, "total": total})

    def begin(self, about: Mapping[str, Any]) -> None:
        self.event("begin", about)

    def metrics(self, values: Mapping[str, Any]) -> None:
        self.event("metrics", values)

    def unprotected(self, values: Mapping[str, Any]) -> None:
        self.event("unprotected", values)

    def end(self, values: Mapping[str, Any], *lines: str) -> None:
        self.event("result", values)

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        self.line(json.dumps({"event": name, **values}))


class LiveView(PlainView):
    """A progress bar with the time left, and the last held-out figures with their course."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console()
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
        )
        self.about = {}
        self.tasks: dict[str, TaskID] = {}
        self.history: list[Mapping[str, Any]] = []
        self.marked = Text()
        self.live = Live(console=self.console, refresh_per_second=8, transient=False)
        self._last = 0.0

    def __enter__(self) -> LiveView:
        self.live.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.live.__exit__(None, None, None)

    def note(self, text: str) -> None:
        self.live.update(Text(f"{text} ...", style="dim"))

    def progress(self, what: str, done: int, total: int) -> None:
        """A bar for each thing that goes on; checks share one."""
        kind = what.split()[0]
        if kind not in self.tasks:
            self.tasks[kind] = self.bar.add_task(what, total=None)
        self.bar.update(self.tasks[kind], description=what, completed=done, total=total or None)
        self.live.update(self.bar)

    def begin(self, about: Mapping[str, Any]) -> None:
        self.about = about
        self.tasks["training"] = self.bar.add_task("training", total=about["planned_steps"], completed=about["steps_taken"])
        self.refresh(force=True)

    def step(self, step: int) -> None:
        self.bar.update(self.tasks["training"], completed=step)
        self.refresh()

    def metrics(self, values: Mapping[str, Any]) -> None:
        self.history.append(values)
        self.refresh(force=True)

    def unprotected(self, values: Mapping[str, Any]) -> None:
        self.marked = Text(unprotected_line(values), style="bold red")

    def end(self, values: Mapping[str, Any], *lines: str) -> None:
        if self.about:
            self.refresh(force=True)
        self.live.stop()
        for text in lines:
            self.console.print(text, highlight=False, soft_wrap=True)

    def refresh(self, *, force: bool = False) -> None:
        if force or time.monotonic() - self._last > 0.1:
            self._last = time.monotonic()
            self.live.update(self.picture(), refresh=force)

    def picture(self) -> Panel:
        """The whole view."""
        last = self.history[-1] if self.history else {}
        table = Table.grid(padding=(0, 2), expand=False)
        for name, text in held_out(last) if last else [("accuracy", "-"), ("loss", "-")]:
            course = [h[f"test_{name}"] for h in self.history if f"test_{name}" in h]
            table.add_row(f"held-out {name}", Text(text, style="bold green" if name == "accuracy" else "bold"), spark(course))
        paid = spent(last.get("epsilon", 0.0), self.about) + (f" at step {last['step']}" if last else "")
        table.add_row("privacy spent", Text(paid, style="bold magenta"), self.budget(last))
        said = [Text(line, style="dim") for line in [headline(self.about), *self.about.get("notes", ())]]
        parts: list[Any] = [*said, self.bar, table]
        if self.marked:
            parts.append(self.marked)
        return Panel(Group(*parts), title="dpulr train", subtitle=str(self.about.get("folder", "")), border_style="cyan")

    def budget(self, last: Mapping[str, Any]) -> Text:
        target, value = self.about.get("target_epsilon"), last.get("epsilon", 0.0)
        if not target or value is None:
            return Text("")
        full = min(30, round(30 * value / target))
        return Text("█" * full, style="magenta") + Text("░" * (30 - full), style="dim")


def held_out(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures on held-out data that there are, by name. The noise of a noisy one is the mean size of what was added."""
    found = []
    if "test_accuracy" in values:
        noise = f" (noise {values['test_noise']:.2%})" if "test_noise" in values else ""
        found.append(("accuracy", f"{values['test_accuracy']:.2%}{noise}"))
    if "test_loss" in values:
        found.append(("loss", f"{values['test_loss']:.4f}"))
    return found


def headline(about: Mapping[str, Any]) -> str:
    return (
        f"{about['dataset']}, {about['parameters']:,} parameters, {about['mechanism']}: noise {about['noise_multiplier']:.4g}, "
        f"rate {about['sample_rate']:.4g}, guarantee {about['guarantee']}"
    )


def spent(epsilon: float | None, about: Mapping[str, Any]) -> str:
    """Epsilon of the budget. None means that there is no guarantee, not that nothing is spent."""
    if epsilon is None:
        return "epsilon: no guarantee"
    target = about.get("target_epsilon")
    return f"epsilon {up(epsilon)}" + (f" of {target:g}" if target else "")


def unprotected_line(values: Mapping[str, Any]) -> str:
    loss = values["training_loss"]
    shown = "-" if loss is None else f"{loss:.4f}"
    return f"UNPROTECTED, not covered by the guarantee: step {values['step']}, batch {values['batch_size']}, training loss {shown}"


def summary(result: Mapping[str, Any]) -> list[str]:
    epsilon = "none" if result["epsilon"] is None else up(result["epsilon"])
    if result["guarantee"] == "nominal":
        epsilon = f"none (nominal {up(result['nominal_epsilon'])})"
    figure = "".join(f"{name} {text}   " for name, text in held_out(result)[:1])
    early = result["status"] == "interrupted" and stopped_early(result["epsilon"], result.get("planned_epsilon"))
    return [
        str(result["statement"]),
        *([f"Interrupted: {early}."] if early else []),
        f"{figure}epsilon {epsilon}   delta {result['delta']:g}   guarantee {result['guarantee']}   {result['seconds']:.0f} s",
    ]


def spark(values: list[float], width: int = 30) -> Text:
    """The course of a number, in blocks."""
    recent = values[-width:]
    if len(recent) < 2:
        return Text("")
    low, high = min(recent), max(recent)
    blocks = "▁▂▃▄▅▆▇█"
    return Text("".join(blocks[round(7 * (v - low) / (high - low))] if high > low else blocks[0] for v in recent), style="cyan")
