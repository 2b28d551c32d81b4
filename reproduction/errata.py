"""Where the paper's privacy claim fails, each with two lines that show it. `python -m reproduction.errata` runs them all.

The two lines see the names of this module. `--markdown` prints docs/errata.md, which a test compares with this file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math  # noqa: F401
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dpulr
from dpulr import accounting
from dpulr.accounting.rejection import odds  # noqa: F401
from dpulr.model.prepare import prepare
from dpulr.paper.mechanism import BoundPaper, Paper
from dpulr.randomness import RandomSource
from dpulr.sampling import ShuffledSampling

LOSS = nn.CrossEntropyLoss(reduction="none")


@dataclass(frozen=True)
class Erratum:
    """`code` is two lines; they see the names of this module."""

    title: str
    severity: str
    text: str
    code: str
    instead: str


ERRATA = (
    Erratum(
        "Layers are clipped one by one",
        "critical",
        "Algorithm 1 clips each layer's gradient to C. One record moves the release by C sqrt(L) for L layers, while the theorem's "
        "sensitivity is C. The noise multiplier is really sigma0 / sqrt(L).",
        """\
total = one_record(Paper(target_std=0, sigma=0.001))
print(f"one record moves 4 layers by {total.norm():.4f} in all; the theorem has C = 1")""",
        "`gaussian` clips a record's gradient jointly over all layers, or shares C among them with sum C_l^2 = C^2. "
        "`hidden-direction` prices the product of all layers.",
    ),
    Erratum(
        "The noise is credited before clipping",
        "critical",
        "The controller takes the covariance of the unclipped proxies and credits sigma0^2 C^2 in every direction. A clipped "
        "record has norm at most C, so the batch's covariance has trace at most B C^2 and a smallest eigenvalue of at most B C^2 "
        "/ d (MNIST, layer 1, B = 500: 0.005 C^2). The extra-noise remedy subtracts the same over-credit.",
        """\
credited, measured = smallest_eigenvalues(sigma0=4.0, records=64)
print(f"smallest variance of a batch's gradient: credited {credited:.1f}, after clipping {measured:.3f}")""",
        "No noise is credited from gradient estimates. What `hidden-direction` credits is that a direction is secret, after the "
        "bound, by Theorem 1.",
    ),
    Erratum(
        "The covariance depends on the record it should hide",
        "critical",
        "With x in the batch the release has another covariance than without it. A mean shift does not bound the divergence of two "
        "Gaussians with different covariances: in many dimensions a change of 1/64 in the variance is enough to tell them apart.",
        """\
d2 = 100_352 * math.log(64 / math.sqrt(65 * (2 * 64 - 65)))
print(f"D_2(N(0, 65 I), N(0, 64 I)) = {d2:.2f} in 100,352 dimensions; a shift of 1 at sigma0 = 4 has {2 / (2 * 4**2)}")""",
        "The noise is isotropic, and its standard deviation is fixed before the data is seen.",
    ),
    Erratum(
        "sigma is itself a release",
        "critical",
        "The controller computes sigma from the losses and Jacobians of the batch. It enters the update, and nothing is charged "
        "for it. A record with a feature nobody else has raises sigma, and so lowers the noise in all other directions; in its own "
        "direction there is no noise but its own.",
        """\
without, with_record = controller_sigma(records=64), controller_sigma(records=64, odd_one=True)
print(f"sigma of the first layer without the odd record {without:.5f}, with it {with_record:.5f}")""",
        "Every constant of a step is public. What depends on the batch is bounded and noised.",
    ),
    Erratum(
        "The Gaussian law is only asymptotic in K",
        "theoretical",
        "The proof takes the mean of K proxies z L as normal. Their tails are heavier, and a privacy statement at delta = 1e-5 "
        "lives in the tails. The paper does not state K.",
        """\
z = np.random.default_rng(0).standard_normal((16, 400_000))
print(f"kurtosis of a mean of K = 16 proxies: {kurtosis((z * np.logaddexp(0, 3 * z)).mean(0)):.2f}; a normal law has 3")""",
        "Added noise is normal by construction, in float64 with true tails.",
    ),
    Erratum(
        "Rejection at N_B = qN is not negligible",
        "critical",
        "Algorithm 1 samples with probability N_B / N and rejects batches below N_B, about half of them. The impairment term "
        "then adds 0.9 to 2.2 to epsilon over 25 epochs of MNIST. It is negligible only with N_B 3 to 5 standard deviations "
        "below qN.",
        """\
terms = [25 * n * odds(1 / n, int(60_000 / n + 1e-9), 60_000) for n in (938, 300, 120)]
print("T x impairment at q = 1/938, 1/300, 1/120:", ", ".join(f"{term:.3f}" for term in terms))""",
        "No rejection by default. With it, its exact price is part of epsilon, and `rejection_threshold='auto'` takes the largest "
        "threshold that is nearly free.",
    ),
    Erratum(
        "The experiments shuffle",
        "theoretical",
        "Batches of a fixed size from a permutation are not Poisson samples. Every record takes part in every epoch, once, for "
        "certain; the amplification by sampling that the theorem uses is not proved for it.",
        """\
counts = participations(ShuffledSampling(10), records=100, batches=10)
print(f"how often a record came in an epoch: at least {min(counts)}, at most {max(counts)}")""",
        'Poisson sampling. Shuffled batches can be had, and the guarantee is then "none".',
    ),
    Erratum(
        "The theorem's conditions are not met",
        "critical",
        "The theorem needs sigma0 >= 4 and q <= 1/5. Nine of the 15 settings have sigma0 = 0.5, 1 or 2. At 0.5 the formula is "
        "below the truth even for the plain sampled Gaussian mechanism (clipped jointly, Poisson, no rejection).",
        """\
setting = {"sample_rate": 1 / 938, "steps": 23_450, "delta": 1e-5}
print(f"sigma0 = 0.5, q = 1/938: formula {formula(0.5, **setting):.2f}, Gaussian mechanism {gaussian(0.5, **setting):.2f}")""",
        "Privacy loss distributions, with no condition on the parameters and every numerical error on the safe side.",
    ),
    Erratum(
        '"The other direction is similar" is not',
        "theoretical",
        "With rejection D' = D + {x} produces batches of N_B - 1 records and x. D can't: such an outcome has infinite loss. So "
        "no Renyi divergence is finite in that direction for a mechanism that shows the batch, and delta has to pay for it. The "
        "impairment must never be added to a numerical Renyi curve.",
        """\
x_r = odds(0.01, 100, 10_000)
print(f"share of D's and x's batches that D cannot produce, N = 10,000, qN = N_B = 100: {x_r / (1 + x_r):.2e} a step")""",
        "Both directions are priced (docs/theory.md, section 3): one pays in delta, the other in epsilon.",
    ),
    Erratum(
        "Losses that are not a sum over records",
        "critical",
        "The paper counts as an advantage that DP-ULR handles losses that are not sums. There, a record changes the signals of "
        "all others: clipping each record no longer bounds the influence of one.",
        """\
contrast = lambda output, target: LOSS(output, target) - LOSS(output, target).mean()
print(refusal(contrast))""",
        "Checked on made-up inputs before the first step, and refused.",
    ),
)


# --- what the two lines use -----------------------------------------------------------------------------------------------
def _bound(settings: Paper, model: nn.Module, x: Tensor, y: Tensor, sigma0: float) -> BoundPaper:
    forward = prepare(model, LOSS, (x[:1], y[:1]), torch.device("cpu"), space=settings.space)
    bound = settings.bind(forward, memory_limit=None, seed=0)
    bound.use(sigma0)
    return bound


def one_record(settings: Paper) -> Tensor:
    """The release of a batch of one MNIST-like record, without noise."""
    torch.manual_seed(0)
    x, y = torch.rand(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        return _bound(settings, dpulr.models.mlp(seed=0), x, y, 0.0).total(x, y, RandomSource(1).directions(x.device))


def _toy(records: int, rare: float = 1.0) -> tuple[nn.Module, Tensor, Tensor]:
    """A small model, and records whose last feature is scaled by `rare`."""
    torch.manual_seed(0)
    x = torch.randn(records, 6)
    x[:, 5] *= rare
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), x, torch.arange(records) % 3


def smallest_eigenvalues(sigma0: float, records: int, draws: int = 500) -> tuple[float, float]:
    """Of the covariance of a batch's gradient in the first layer: what the controller credits, and what is measured."""
    model, x, y = _toy(records)
    bound, directions = _bound(Paper(sigma=1e3), model, x, y, sigma0), RandomSource(1).directions(x.device)
    with torch.inference_mode():
        sums = torch.stack([bound._parts(bound.total(x, y, directions))[0] for _ in range(draws)])
    return sigma0**2, torch.linalg.eigvalsh(sums.t().cov().double())[0].item()


def controller_sigma(records: int, *, odd_one: bool = False) -> float:
    model, x, y = _toy(records, rare=0.01)
    if odd_one:
        x, y = torch.cat([x, 5 * torch.eye(6)[5:]]), torch.cat([y, y[:1]])
    bound = _bound(Paper(sigma=1e3), model, x, y, 4.0)
    with torch.inference_mode():
        bound.total(x, y, RandomSource(1).directions(x.device))
    return bound.controls[0].sigma


def kurtosis(values: np.ndarray) -> float:
    centred = values - values.mean()
    return float((centred**4).mean() / (centred**2).mean() ** 2)


def participations(sampler: ShuffledSampling, records: int, batches: int) -> list[int]:
    rng = np.random.default_rng(0)
    drawn = np.concatenate([sampler.draw(records, rng) for _ in range(batches)])
    return [int(count) for count in np.bincount(drawn, minlength=records)]


def formula(sigma0: float, **setting: Any) -> float:
    """The paper's bound with a threshold so low that rejection costs nothing."""
    return accounting.paper_nominal_epsilon(
        target_std=sigma0, rejection_threshold=1, dataset_size=60_000, ignore_conditions=True, **setting
    )


def gaussian(sigma0: float, **setting: Any) -> float:
    return accounting.gaussian_epsilon(noise_multiplier=sigma0, **setting)


def refusal(loss: Callable[[Tensor, Tensor], Tensor]) -> str:
    """What the engine says to a loss function."""
    model, x, y = _toy(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(x, y)
    try:
        dpulr.PrivacyEngine(model, optimizer, data, loss, batch_size=8, steps=1, noise_multiplier=1.0)
    except ValueError as problem:
        return f"refused: {problem}"
    return "accepted"


# --- running and printing -------------------------------------------------------------------------------------------------
def demonstrate(erratum: Erratum) -> str:
    """What the two lines print."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(erratum.code, dict(globals()))
    return output.getvalue().strip()


HEAD = """\
# Errata of the paper's privacy claim

`paper` implements Algorithm 1 to the letter. The epsilon of the paper's theorem is *nominal*: a formula's value, not a guarantee.
These are the reasons. Severity: *critical* (the claimed epsilon is wrong), *theoretical* (a gap in the proof, or an effect that is
not known to be exploitable). Under each stand two lines that show it and what they print; all of them run with

    python -m reproduction.errata

The names they use are imported or defined in `src/dpulr/experiments/errata.py`, which also writes this page (`--markdown`).
"""


def markdown() -> str:
    parts = [HEAD]
    for number, erratum in enumerate(ERRATA, 1):
        parts.append(
            f"## {number}. {erratum.title} ({erratum.severity})\n\n{erratum.text}\n\n```python\n{erratum.code}\n```\n"
            f"```\n{demonstrate(erratum)}\n```\n\n**Certified mechanisms:** {erratum.instead}\n"
        )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the paper's privacy claim fails, shown item by item.")
    parser.add_argument("--markdown", action="store_true", help="print docs/errata.md")
    if parser.parse_args().markdown:
        print(markdown(), end="")
        return
    for number, erratum in enumerate(ERRATA, 1):
        print(f"{number}. {erratum.title} ({erratum.severity})\n   {demonstrate(erratum)}", flush=True)


if __name__ == "__main__":
    main()
