"""One run: the settings of `dpulr train`, and whose training loop takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from dpulr import mechanisms
from dpulr.runs.settings import Settings

Loop = Literal["dpulr", "opacus", "paper", "beyond", "plain"]
Progress = Callable[[float], None]
Result = dict[str, Any]

# What a description means where it does not say: the values of 0.1.0, fixed for good. So a default of the package may change, and
# an option may be added, without making results unfindable.
SETTINGS: dict[str, Any] = {
    "steps": None,
    "target_epsilon": None,
    "target_delta": 1e-5,
    "noise_multiplier": None,
    "momentum": 0.9,
    "schedule": "cosine",
    "holdout": 0,
    "sampling": "poisson",
    "rejection_threshold": 0,
    "min_dataset_size": None,
    "insecure_noise_seed": None,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "hidden-direction": {
        "layer_weights": "auto",
        "radius": 0.1,
        "kappa": None,
        "last_layer": "hidden",
        "space": "auto",
        "subspace": "auto",
        "antithetic": True,
        "groups": None,
    },
    "gaussian": {
        "estimator": "antithetic",
        "sigma": 0.1,
        "max_grad_norm": 1.0,
        "clipping": "joint",
        "layer_weights": None,
        "space": "auto",
        "subspace": None,
    },
    "gradient": {"max_grad_norm": 1.0, "clipping": "joint", "layer_weights": None},
    "zeroth-order": {"radius": 1e-3, "directions": "normal", "max_grad_norm": 1.0},
    "opacus": {"max_grad_norm": 1.0, "mode": "ghost", "physical_batch": None},
    "paper": {"max_grad_norm": 1.0},
}
_KNOWN = {
    *SETTINGS,
    "dataset",
    "model",
    "mechanism",
    "repeats",
    "batch_size",
    "epochs",
    "learning_rate",
    "seed",
    "mechanism_options",
}


@dataclass(frozen=True)
class Run:
    """`loop`: "dpulr" is the package's own; "opacus" is DP-SGD with exact gradients at the same epsilon (opacus.py); "paper" is
    the paper's evaluation with its optimizers and learning rates (paper_runs.py); "plain" has no privacy (texts.py)."""

    settings: Settings
    loop: Loop = "dpulr"

    @property
    def file(self) -> str:
        """Where its result is kept."""
        if self.loop == "beyond":
            return "beyond.json"
        if self.settings.holdout:
            return "held-out.json"
        return "paper.json" if self.loop == "paper" else "certified.json"

    def describe(self) -> dict[str, Any]:
        """All that decides what the run does, as plain values, with today's defaults written out.

        What 0.1.0 did not know is left out where it stands at its default.
        """
        values = self.settings.to_dict()
        for item in fields(self.settings):
            if item.name == "evaluations" or (item.name not in _KNOWN and values[item.name] == item.default):
                del values[item.name]
        usual = OPTIONS.get(self.settings.mechanism, {})
        if self.loop == "dpulr":
            kind: Any = mechanisms.registry()[self.settings.mechanism]
            defaults = {item.name: item.default for item in fields(kind) if item.name in usual}
            values["mechanism_options"] = defaults | values["mechanism_options"]
        return {"loop": self.loop, **values}

    @property
    def title(self) -> str:
        """A few words for whoever watches."""
        s = self.settings
        cost = f"epsilon {s.target_epsilon:.3f}" if s.target_epsilon else f"sigma0 {s.noise_multiplier or 0:g}"
        repeats = f", K {s.repeats}" if s.repeats else ""
        model = s.model.rpartition(":")[2]
        rate = s.learning_rate if isinstance(s.learning_rate, str) else f"{s.learning_rate:g}"
        return f"{s.mechanism} {model}, batch {s.batch_size}, {cost}{repeats}, rate {rate}, seed {s.seed}"

    def train(self, progress: Progress) -> Result:
        """Train and evaluate; `progress` hears the share that is done."""
        return {"run": self.describe(), **self.numbers(progress)}

    def numbers(self, progress: Progress) -> Result:
        """What comes of it, without the description."""
        if self.loop == "opacus":
            from reproduction import opacus

            return opacus.train(self.settings, progress)
        if self.loop == "paper":
            from reproduction import paper_runs

            return paper_runs.train(self.settings, progress)
        if self.loop == "beyond":
            from reproduction import beyond

            return beyond.train(self.settings, progress)
        from dpulr.runs import training

        numbers = training.train_and_evaluate(self.settings, lambda taken, planned, _: progress(taken / planned))
        del numbers["settings"]  # the description says more
        return numbers
