"""Small discrete pairs, whose divergences are plain sums."""

import numpy as np
from hypothesis import strategies as st

from dpulr.accounting.dominating_pairs import atoms

masses = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6)


def finite_pair(p, q):
    size = min(len(p), len(q))
    p, q = np.array(p[:size]), np.array(q[:size])
    p, q = p / p.sum(), q / q.sum()
    return atoms(np.log(q / p), p, q)


def divergence(p, q, a):
    return float(np.maximum(q - a * p, 0).sum())
