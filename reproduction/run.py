"""One run: the settings of `dpulr train`, and whose training loop takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dpulr.runs import loading
from dpulr.runs.settings import Settings

Loop = Literal["dpulr", "opacus", "paper"]
Progress = Callable[[float], None]
Result = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """`loop`: "dpulr" is the package's own; "opacus" is DP-SGD with exact gradients at the same epsilon (opacus.py); "paper" is
    the paper's evaluation with its optimizers and learning rates (paper_runs.py)."""

    settings: Settings
    loop: Loop = "dpulr"

    @property
    def file(self) -> str:
        """Where its result is kept."""
        if self.settings.holdout:
            return "held-out.json"
        return "paper.json" if self.loop == "paper" else "certified.json"

    def describe(self) -> dict[str, Any]:
        """All that decides what the run does, as plain values, with the mechanism's defaults written out."""
        values = {"loop": self.loop, **asdict(self.settings)}
        del values["evaluations"]
        if self.loop == "dpulr":
            options = vars(loading.make_mechanism(self.settings)).items()
            values["mechanism_options"] = {name: value for name, value in options if name != "repeats"}
        return values

    @property
    def title(self) -> str:
        """A few words for whoever watches."""
        s = self.settings
        cost = f"epsilon {s.target_epsilon:.3f}" if s.target_epsilon else f"sigma0 {s.noise_multiplier or 0:g}"
        repeats = f", K {s.repeats}" if s.repeats else ""
        model = s.model.rpartition(":")[2]
        return f"{s.mechanism} {model}, batch {s.batch_size}, {cost}{repeats}, rate {s.learning_rate:g}, seed {s.seed}"

    def train(self, progress: Progress) -> Result:
        """Train and evaluate; `progress` hears the share that is done."""
        if self.loop == "opacus":
            from reproduction import opacus

            numbers = opacus.train(self.settings, progress)
        elif self.loop == "paper":
            from reproduction import paper_runs

            numbers = paper_runs.train(self.settings, progress)
        else:
            from dpulr.runs import training

            numbers = training.train_and_evaluate(self.settings, progress=lambda taken, planned: progress(taken / planned))
        return {"run": self.describe(), **numbers}
