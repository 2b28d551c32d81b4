"""The Gaussian release: its dominating pair (docs/theory.md, section 4) and its Renyi divergences, as a cross-check."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpulr.accounting.dominating_pairs import CUT, Array, Cells, cells, normal_mass
from dpulr.accounting.renyi import ORDERS

WIDTH = 0.02  # of a cell, in standard deviations
MOST_CELLS = 50_000


def gaussian_cells(noise_multiplier: float) -> Cells:
    """N(0, s^2) against N(1, s^2), cut into cells."""
    shift = 1 / noise_multiplier
    count = min(math.ceil((2 * CUT + shift) / WIDTH), MOST_CELLS)
    edges = np.linspace(-CUT, CUT + shift, count + 1)
    loss = shift * edges - shift**2 / 2
    p = normal_mass(edges)
    q = normal_mass(edges - shift)
    tail = float(special.ndtr(-CUT))
    # Outside the edges P has mass `tail` below and less above; Q the other way round. All of it counts as telling.
    return cells(loss[:-1], loss[1:], p, q, q_only=2 * tail, p_only=2 * tail)


def sampled_renyi(noise_multiplier: float, sample_rate: float) -> Array:
    """Renyi divergences of one Poisson-sampled step at ORDERS, by dp-accounting: it shares no code with the pair above."""
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError as problem:
        raise ModuleNotFoundError(
            "method='rdp' of the Gaussian mechanism needs dp-accounting: pip install dp-accounting"
        ) from problem
    accountant = RdpAccountant(list(ORDERS))
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(sample_rate, event))
    return np.asarray(accountant.rdp, dtype=np.float64)
