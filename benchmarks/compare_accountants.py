"""Our Gaussian epsilon beside those of dp-accounting and Opacus, on the paper's 15 MNIST settings."""

from __future__ import annotations

import warnings

from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from opacus.accountants import PRVAccountant, RDPAccountant

from dpulr import accounting

DELTA = 1e-5
SETTINGS = [(1 / n, 25 * n, noise) for n in (938, 300, 120) for noise in (0.5, 1.0, 2.0, 4.0, 8.0)]


def others(rate: float, steps: int, noise: float) -> dict[str, float]:
    event = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise)), steps)
    result = {
        "dp-accounting PLD": pld_privacy_accountant.PLDAccountant().compose(event).get_epsilon(DELTA),
        "dp-accounting RDP": rdp_privacy_accountant.RdpAccountant().compose(event).get_epsilon(DELTA),
    }
    for name, kind in (("Opacus PRV", PRVAccountant), ("Opacus RDP", RDPAccountant)):
        accountant = kind()
        accountant.history = [(noise, rate, steps)]
        result[name] = accountant.get_epsilon(delta=DELTA)
    return result


def main() -> None:
    warnings.simplefilter("ignore")
    ratios: dict[str, list[float]] = {}
    for rate, steps, noise in SETTINGS:
        ours = accounting.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=steps, delta=DELTA)
        row = others(rate, steps, noise)
        print(f"q=1/{1 / rate:.0f} T={steps} noise={noise}: ours {ours:.4f}  " + "  ".join(f"{k} {v:.4f}" for k, v in row.items()))
        for name, value in row.items():
            ratios.setdefault(name, []).append(value / ours - 1)
    for name, values in ratios.items():
        print(f"{name}: {min(values):+.2%} to {max(values):+.2%} of ours")


if __name__ == "__main__":
    main()
