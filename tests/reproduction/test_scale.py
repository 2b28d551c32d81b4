"""The model of costs in docs/scale.md."""

from __future__ import annotations

import pytest

from benchmarks import scale


def rows(known: scale.Costs, cores: int) -> list[dict[str, float]]:
    cases = [(size, batch) for size in (1, 2, 4) for batch in (500, 2_000)]
    return [{"ranks": size, "batch": batch, "seconds": known.locally(size, batch, cores)} for size, batch in cases]


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_the_fit_finds_the_costs_that_made_the_times(cores: int) -> None:
    known = scale.Costs(fixed=2e-3, record=1e-5, wait=1e-4)
    found = scale.Costs.fitted(rows(known, cores), cores)
    for name in ("fixed", "record", "wait"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6)


def test_a_prediction_by_hand() -> None:
    """Ten workers: 9 messages to rank 0, 4 of the tree and 18 of the ring, and 1.8 times a release of 40,000 bytes."""
    causes = scale.Costs(fixed=2e-3, record=1e-5, wait=1.0).on_network(10, 2_000, 10_000)
    assert causes == pytest.approx({"fixed": 2e-3, "records": 2e-3, "latency": 31 * 50e-6, "bandwidth": 1.8 * 40_000 / 1.25e9})


def test_the_first_bottleneck_is_named() -> None:
    known = scale.Costs(fixed=1.9e-3, record=1e-5, wait=1e-4)
    found = {"job": [{**row, "numbers": 100} for row in rows(known, 8)]}
    assert "fixed, from 11 workers on" in scale.bottleneck(found, 8)  # 2,000 / 11 records cost 1.82 ms; messages 1.7
    assert "1,000 workers" in scale.prediction(found, 8)
