"""Weights of records: they act whatever a mechanism keeps of a loss, and nothing gets beyond its bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.errors import InvalidArgument
from dpulr.mechanisms import Mechanism
from dpulr.model.weights import RecordWeights
from tests.support.core import LOSS, engine, gradient, mlp, points, train

LABELS = torch.tensor([0, 1, 2, 1])
MECHANISMS: list[Mechanism] = [
    dpulr.HiddenDirection(),
    dpulr.HiddenDirection(kappa="adaptive"),
    dpulr.HiddenDirection(last_layer="exact"),
    dpulr.Gaussian(repeats=2),
    dpulr.Gradient(),
    dpulr.ZerothOrder(repeats=2),
]


def private(mechanism: Any, weights: Any = None, **changes: Any) -> dpulr.PrivacyEngine:
    options = {"batch_size": 30, "steps": 1, "noise_multiplier": 1e-3, "insecure_noise_seed": 1, "weights": weights}
    return engine(mlp(), points(), mechanism=mechanism, **{**options, **changes})


def shares(engine: dpulr.PrivacyEngine, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """What each record adds, alone, with the same directions."""
    from tests.support.core import directions

    with torch.inference_mode():
        public = engine.fitted.draw_public(0)
        return [
            engine.fitted.sum_of_bounded_signals((inputs[i : i + 1], targets[i : i + 1]), public, directions(7)).clone()
            for i in range(len(targets))
        ]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: str(mechanism))
def test_a_record_s_signal_is_multiplied_by_its_weight(mechanism: Any) -> None:
    """So it stays within its bound; votes about scales are no signal, and stay what they are."""
    x, y = points(12).tensors
    plain, weighed = (shares(private(mechanism, weights), x, y) for weights in (None, dpulr.class_weights([1, 50, 100])))
    votes = 2 if mechanism == MECHANISMS[1] else 0
    for before, after, label in zip(plain, weighed, y.tolist(), strict=True):
        end = len(before) - votes
        assert torch.allclose(after[:end], before[:end] * [0.01, 0.5, 1][label], rtol=1e-4, atol=1e-9)
        assert torch.equal(after[end:], before[end:])
        assert before[:end].norm() > 0


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: str(mechanism))
def test_class_weights_change_what_is_learned(mechanism: Any) -> None:
    found = []
    for weights in (None, dpulr.class_weights([1, 100, 100])):
        one = private(mechanism, weights)
        train(one)
        found.append(gradient(one.model))
    assert torch.linalg.vector_norm(found[0] - found[1]) > 0.1 * torch.linalg.vector_norm(found[0])


def test_weights_beyond_their_range_are_clipped_and_odd_ones_count_nothing() -> None:
    table = torch.tensor([7.0, -3.0, math.nan])
    weights = RecordWeights(lambda targets: table[targets], torch.tensor([0, 1]), torch.float32)
    assert weights(LABELS).tolist() == [1, 0, 0, 0]


def test_a_record_whose_weight_raises_counts_nothing_and_the_others_do() -> None:
    weights = RecordWeights(dpulr.class_weights([1, 2]), torch.tensor([0, 1]), torch.float32)
    assert weights(LABELS).tolist() == [0.5, 1, 0, 1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda targets: targets / targets.double().mean().clamp(min=0.1), "a record's own target alone"),
        (lambda targets: torch.ones(len(targets)) * (len(targets) < 300), "a record's own target alone"),
        (lambda targets: torch.ones(()), "one number per record"),
        (lambda targets: torch.where(targets.max() > 2, 0.0, 1.0).expand(len(targets)), "a record's own target alone"),
    ],
)
def test_functions_that_are_no_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        private(dpulr.HiddenDirection(), weights)


def test_a_branch_on_a_target_is_each_record_s_own() -> None:
    """One record of label 5 took the weight of all others: their sum moved by its whole length."""
    weights = RecordWeights(
        lambda targets: torch.full((len(targets),), float(targets.max() < 5)), torch.tensor([0, 1]), torch.float32
    )
    assert weights(torch.tensor([0, 1, 5, 2])).tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("weights", [[1], [0, 0], [1, -1], [1, math.inf]])
def test_class_weights_must_be_weights(weights: Any) -> None:
    with pytest.raises(InvalidArgument, match="a number of at least 0 for each class"):
        dpulr.class_weights(weights)


def test_the_paper_s_mechanism_does_not_weigh() -> None:
    with pytest.raises(InvalidArgument, match="paper does not weigh records"):
        engine(mlp(), points(), mechanism="paper", weights=dpulr.class_weights([1, 2, 3]), rejection_threshold=5)


@pytest.mark.parametrize(("most", "refused"), [(1, False), (2, True)])
def test_a_person_s_records_are_not_weighed(most: int, refused: bool) -> None:
    """A person is bounded by the mean over all records: with weights 0 and 1, opposite gradients would no longer cancel."""
    options = {"unit": [i // 2 for i in range(40)], "max_per_person": most, "weights": dpulr.class_weights([1, 2, 3])}
    if not refused:
        engine(mlp(), points(), mechanism="gradient", **options)
        return
    with pytest.raises(InvalidArgument, match="max_per_person=1"):
        engine(mlp(), points(), mechanism="gradient", **options)


# --- weights of a loss ------------------------------------------------------------------------------------------------------
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0, 100.0]), reduction="none")


def test_weights_that_a_sign_forgets_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"weight of CrossEntropyLoss would change nothing.*class_weights"):
        engine(mlp(), points(), loss_fn=WEIGHTED, mechanism="hidden-direction")


@pytest.mark.parametrize("mechanism", [dpulr.HiddenDirection(kappa="adaptive"), dpulr.Gaussian(repeats=1), dpulr.Gradient()])
def test_weights_that_act_are_not(mechanism: Any) -> None:
    engine(mlp(), points(), loss_fn=WEIGHTED, mechanism=mechanism)


class OneLabel(nn.BCEWithLogitsLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target).mean(1)


@pytest.mark.parametrize(("labels", "refused"), [(1, True), (3, False)])
def test_pos_weight_is_lost_with_one_label_and_acts_with_several(labels: int, refused: bool) -> None:
    loss = OneLabel(pos_weight=torch.tensor([30.0]), reduction="none")
    data = TensorDataset(torch.randn(40, 6), torch.rand(40, labels).round())
    model = nn.Sequential(nn.Linear(6, labels))
    if not refused:
        engine(model, data, loss_fn=loss, mechanism="hidden-direction")
        return
    with pytest.raises(InvalidArgument, match="pos_weight of OneLabel would change nothing"):
        engine(model, data, loss_fn=loss, mechanism="hidden-direction")


def test_the_plain_loss_is_left_as_it_is() -> None:
    engine(mlp(), points(), loss_fn=LOSS, mechanism="hidden-direction")
    assert WEIGHTED.weight.tolist() == [1, 10, 100]
