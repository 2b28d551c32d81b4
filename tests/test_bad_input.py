"""Arguments, optimizers and labels that make no sense are refused in a plain sentence, before any record is used."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from dpulr.errors import BudgetError, DataError, InvalidArgument, ModelRefused, StepError
from tests.support.core import engine
from tests.support.refusals import Watched, refused


def test_every_kind_of_error_is_what_callers_expect() -> None:
    for kind in (InvalidArgument, DataError, ModelRefused, BudgetError):
        assert issubclass(kind, ValueError)
    assert issubclass(StepError, RuntimeError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 41}, "batch_size is 41, but the data set has only 40 records"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": None}, "give batch_size"),
        ({"batch_size": 8, "sample_rate": 0.5}, "not both"),
        ({"batch_size": None, "expected_batch_size": 8, "sample_rate": 1.5}, "sample_rate is 1.5"),
        ({"batch_size": None, "expected_batch_size": -8, "sample_rate": 0.5}, "expected_batch_size is -8"),
        ({"epochs": 2}, "epochs or steps, not both"),
        ({"steps": None}, "give epochs or steps"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"steps": None, "epochs": -1}, "epochs is -1"),
        ({"noise_multiplier": None}, "give target_epsilon"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier is nan"),
        ({"target_epsilon": 0.0}, "target_epsilon is 0.0"),
        ({"target_epsilon": float("inf")}, "target_epsilon is inf"),
        ({"target_delta": 0.0}, "target_delta is 0.0"),
        ({"target_delta": 1.0}, "target_delta is 1.0"),
        ({"target_epsilon": 0.01, "noise_multiplier": 0.5}, "not one step fits.*target_epsilon=0.01"),
        ({"mechanism": "magic"}, "mechanism is 'magic'"),
        ({"sampling": "alphabetical"}, "sampling is 'alphabetical'"),
        ({"rejection_threshold": 30}, "rejection_threshold is 30"),
        ({"rejection_threshold": -1}, "rejection_threshold is -1"),
        (
            {"batch_size": None, "expected_batch_size": 8, "sample_rate": 0.2, "rejection_threshold": 4},
            "needs min_dataset_size",
        ),
        ({"min_dataset_size": 40}, "min_dataset_size is 40, but the data set has 40"),
        ({"replay": "magic"}, "replay is 'magic'"),
        ({"memory_limit": 10}, "memory_limit is 10"),
    ],
)
def test_settings(settings: dict[str, Any], message: str) -> None:
    kind = BudgetError if "not one step fits" in message else InvalidArgument
    refused(kind, message, **settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"batch_size": "20"}, "batch_size"),
        ({"batch_size": 8.5}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"epochs": "two", "steps": None}, "epochs"),
        ({"steps": math.inf}, "steps"),
        ({"noise_multiplier": "1"}, "noise_multiplier"),
        ({"target_epsilon": "1"}, "target_epsilon"),
        ({"target_delta": None}, "target_delta"),
        ({"memory_limit": "1 GB"}, "memory_limit"),
        ({"min_dataset_size": "7"}, "min_dataset_size"),
        ({"seed": -1}, "seed"),
        ({"insecure_noise_seed": 1.5}, "insecure_noise_seed"),
        ({"noise_multiplier": 0.0, "target_epsilon": 1.0}, "without noise"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind_are_named(settings: dict[str, Any], name: str) -> None:
    refused(InvalidArgument, name, **settings)


def test_optimizers() -> None:
    model, other, clone = nn.Sequential(nn.Linear(6, 3)), nn.Linear(2, 2), nn.Sequential(nn.Linear(6, 3))
    both = [*model.parameters(), *clone.parameters()]
    for optimizer, message in (
        (torch.optim.SGD(other.parameters(), lr=1.0), "holds a parameter of shape .2, 2. that is not the model's"),
        (torch.optim.SGD([model[0].weight], lr=1.0), "does not hold '0.bias'"),
        (torch.optim.SGD(both, lr=1.0), "not the model's"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS"),
        ("sgd", "must be a torch optimizer, not str"),
    ):
        refused(InvalidArgument, message, model, optimizer=optimizer)


@pytest.mark.parametrize("labels", [torch.arange(40) % 5, torch.full((40,), -1)], ids=["some", "all"])
def test_labels_out_of_range_decide_nothing_at_set_up(labels: torch.Tensor) -> None:
    """They are private. `dpulr data check` tells the owner (tests/data/test_checking.py)."""
    private = engine(nn.Sequential(nn.Linear(6, 3)), torch.utils.data.TensorDataset(torch.zeros(40, 6), labels), batch_size=8)
    assert private.guarantee == "certified"
    private.step(*next(private.batches()))


def test_checks_do_not_depend_on_private_values() -> None:
    """The same data set with other values is accepted or refused alike: only shapes and labels count."""
    data = Watched()
    data.x[:] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="the data set has 40 records")  # their number is public
        engine(nn.Sequential(nn.Linear(6, 3)), data, batch_size=8)
    assert data.reads == [0]
