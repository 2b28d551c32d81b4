"""Sweep the accountant's stated range against an oracle that shares no code with it, and print the worst ratio.

    python benchmarks/check_accounting.py            # every fifth setting, spread over the range: some 15 minutes
    python benchmarks/check_accounting.py --quick    # every 23rd: three minutes
    python benchmarks/check_accounting.py --all      # all of them: an hour or more

Each setting is one mechanism calibrated to an epsilon between 0.05 and 20. The ratio is our epsilon over the oracle's:
below 1 the guarantee would be false, above 1.03 the bound is looser than promised. Exit status 1 in either case.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("DPULR_CACHE", "off")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dpulr import accounting as acc
from dpulr.errors import BudgetError
from tests.support.accounting_oracle import epsilon_near, nodes, product_nodes

DELTA = 1e-5
TARGETS = (0.06, 1.0, 18.0)
SAMPLING = ((1.0, 1), (1.0, 1000), (1.0, 10**6), (0.1, 1000), (0.01, 10**4), (1e-3, 10**5), (1e-4, 10**4), (1e-5, 10**6))
TOO_LOW, TOO_HIGH = 1 - 1e-4, 1.03


@dataclass(frozen=True)
class Layout:
    """Layers of one release: dims with their number, draws, and the weight of an exact part (0: none)."""

    dims: tuple[tuple[int, int], ...]
    repeats: int = 1
    exact: float = 0.0

    def release(self, noise: float) -> acc.HiddenDirectionRelease:
        dims = [dim for dim, count in self.dims for _ in range(count)]
        return acc.hidden_direction_release(noise, dims, repeats=self.repeats, gaussian_weights=[self.exact] if self.exact else [])

    def __str__(self) -> str:
        layers = "+".join(f"{dim}" + (f"x{count}" if count > 1 else "") for dim, count in self.dims)
        return f"d={layers} K={self.repeats}" + (" +exact" if self.exact else "")


LAYOUTS = (
    *(Layout(((dim, 1),)) for dim in (1, 2, 3, 10, 128, 1000, 10_000, 100_000)),
    *(Layout(((dim, 1),), repeats) for dim in (2, 128, 100_000) for repeats in (4, 256)),
    Layout(((128, 1), (64, 1), (32, 1), (10, 1))),
    Layout(((128, 1), (64, 1), (32, 1)), exact=1.0),
    Layout(((128, 60), (10, 40))),
    Layout(((512, 50), (16, 50)), 256),
)


def oracle(layout: Layout, noise: float, rate: float, steps: int, guess: float) -> float:
    spread = noise * math.sqrt(layout.repeats)
    if layout.repeats == 1 and len(layout.dims) == 1 and layout.dims[0][1] == 1 and not layout.exact:
        fine = 4 if steps == 1 or layout.dims[0][0] == 1 else 2 if rate < 1e-3 else 1  # rare samples weigh the far tail
        single = nodes(layout.dims[0][0], spread, fine=fine)
        return epsilon_near(*single, rate, steps, DELTA, guess)
    parts = [(*nodes(dim, spread, fine=2), count * layout.repeats) for dim, count in layout.dims]
    if layout.exact:
        parts.append((*nodes(1, noise / layout.exact, fine=4), 1))
    return epsilon_near(*product_nodes(parts), rate, steps, DELTA, guess)


def settings() -> list[tuple[Layout, float, int, float]]:
    return [(layout, rate, steps, target) for layout in LAYOUTS for rate, steps in SAMPLING for target in TARGETS]


# Where epsilon reacts most steeply to the noise, so that every looseness shows most. Always checked.
HARDEST = [(LAYOUTS[k], rate, steps, 1.0) for k in (11, -2, -1) for rate, steps in ((1e-5, 10**6), (1e-4, 10**4))]


def check(layout: Layout, rate: float, steps: int, target: float) -> float | None:
    start = time.perf_counter()
    try:
        noise = acc.calibrate_release(layout.release, target_epsilon=target, delta=DELTA, sample_rate=rate, steps=steps)
    except BudgetError as error:
        print(f"{layout!s:28} q={rate:<7g} T={steps:<8d} cannot reach {target}: {error}")
        return None
    ours = acc.epsilon([acc.Charge(acc.SampledStep(layout.release(noise), rate), steps)], DELTA)
    middle = time.perf_counter()
    if not 0.05 <= ours <= 20:
        return None
    exact = oracle(layout, noise, rate, steps, ours)
    ratio = ours / exact
    flag = "" if TOO_LOW <= ratio <= TOO_HIGH else "  <--"
    print(
        f"{layout!s:28} q={rate:<7g} T={steps:<8d} tau={noise:<10.4g} ours={ours:<9.5g} oracle={exact:<9.5g} "
        f"ratio={ratio:.5f}  {middle - start:4.1f}s + {time.perf_counter() - middle:4.1f}s{flag}",
        flush=True,
    )
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every 23rd setting")
    parser.add_argument("--all", action="store_true", help="every setting")
    given = parser.parse_args()
    found = []
    chosen = settings() if given.all else settings()[:: 23 if given.quick else 5] + HARDEST
    for layout, rate, steps, target in chosen:
        ratio = check(layout, rate, steps, target)
        if ratio is not None:
            found.append((ratio, f"{layout}, q={rate:g}, T={steps}, epsilon about {target:g}"))
    lowest, highest = min(found), max(found)
    print(f"\n{len(found)} settings. Lowest ratio {lowest[0]:.5f} ({lowest[1]}).")
    print(f"Worst ratio {highest[0]:.5f} ({highest[1]}). Never below the oracle: {lowest[0] >= TOO_LOW}.")
    return 0 if lowest[0] >= TOO_LOW and highest[0] <= TOO_HIGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
