"""How a budget is shared among layers."""

from __future__ import annotations

import pytest

from dpulr.mechanisms.layer_budget import LayerCost, balanced


def test_automatic_weights_meet_the_rule_of_equal_marginal_signal() -> None:
    costs = [LayerCost.hidden(d, 1) for d in (128, 64, 32, 10)]
    weights = balanced(costs, 1.575)
    reference = (1.645, 1.375, 1.128, 0.760)  # docs/theory.md, for equal cost at noise 2
    assert [w / weights[0] for w in weights] == pytest.approx([r / reference[0] for r in reference], rel=0.01)
    assert sum(w * w for w in weights) == pytest.approx(4)
    marginal = []
    for cost, weight in zip(costs, weights, strict=True):
        c = weight / 1.575
        marginal.append((cost.slope**2 * 2 * c + 4 * cost.quartic * c**3) / cost.slope)
    assert marginal == pytest.approx([marginal[0]] * 4)
