"""The paper's mechanism in the settings of docs/audit.md: 64 records, 5 classes, clip bound 1, sigma0 = 4, one step.

The claim held against it is the one its proof makes: a Gaussian mechanism of noise multiplier sigma0, epsilon 0.926 at delta 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpulr.audit.games import BatchGame
from dpulr.audit.one_step import play
from dpulr.audit.verdict import Verdict
from dpulr.paper.mechanism import Paper, Remedy

_FEATURES, _CLASSES, _RECORDS = 8, 5, 64


@dataclass(frozen=True)
class PaperSetting:
    """`canary`: ordinary, large (100 times an ordinary record), feature (one that all others have zero), weak (10 long, along the
    direction in which the other records have least). `trials`: as many as it takes to refute the claim with room to spare, where
    it can be refuted at all."""

    remedy: Remedy
    canary: str
    repeats: int
    trials: int
    sigma: float = 0.5

    @property
    def name(self) -> str:
        return f"{self.remedy}, K = {self.repeats}, sigma {self.sigma:g}"

    def audit(
        self, *, delta: float = 1e-5, confidence: float = 0.95, seed: int | None = None, trials: int | None = None
    ) -> Verdict:
        torch.manual_seed(0)
        inputs, targets, canary = _data(self.canary)
        game = BatchGame(
            Paper(remedy=self.remedy, repeats=self.repeats, sigma=self.sigma),
            model=nn.Sequential(nn.Linear(_FEATURES, _CLASSES)),
            loss_fn=nn.CrossEntropyLoss(reduction="none"),
            records=(inputs, targets),
            canary=canary,
            noise_multiplier=4.0,
            seed=seed,
        )
        settings = {"remedy": self.remedy, "repeats": self.repeats, "sigma": self.sigma, "records": _RECORDS}
        return play(
            game,
            canary=self.canary,
            trials=self.trials if trials is None else trials,
            delta=delta,
            confidence=confidence,
            settings=settings,
        )


def _data(kind: str) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_RECORDS, _FEATURES, generator=generator)
    targets = torch.randint(0, _CLASSES, (_RECORDS,), generator=generator)
    ordinary = torch.randn(_FEATURES, generator=generator)
    if kind == "feature":
        inputs[:, 0] = 0
        canary = 10 * torch.eye(_FEATURES)[0]
    elif kind == "weak":
        axis = torch.linalg.eigh(inputs.T @ inputs)[1][:, 0]
        canary = -10 * axis * torch.sign(axis[0])
    else:
        canary = {"ordinary": 1, "large": 100}[kind] * ordinary
    return inputs, targets, (canary, torch.tensor(1))


PAPER_SETTINGS = (
    PaperSetting("auto", "feature", 16, 3_000),
    PaperSetting("auto", "large", 64, 3_000),
    PaperSetting("auto", "weak", 64, 12_000),
    PaperSetting("auto", "ordinary", 64, 3_000),
    PaperSetting("extra-noise", "feature", 4, 100_000),
    PaperSetting("extra-noise", "large", 64, 3_000),
    PaperSetting("extra-noise", "weak", 16, 3_000, 2.0),
    PaperSetting("extra-noise", "ordinary", 16, 3_000),
    PaperSetting("parameters", "weak", 256, 4_000),
    PaperSetting("parameters", "large", 64, 12_000, 2.0),
    PaperSetting("parameters", "feature", 64, 12_000),
)
