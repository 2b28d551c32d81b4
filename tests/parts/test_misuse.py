"""What would void a guarantee behind the engine's back, and what going back to earlier weights costs."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import pytest
import torch

from dpulr import PrivacyEngine
from dpulr.errors import InvalidArgument, PrivacyRefusal, StepError
from tests.support.core import LOSS, blobs, engine, small_mlp, train


def test_going_back_forgets_no_step() -> None:
    """20 steps, back to step 5, 15 more: 35 releases, all charged; in a new engine of the same process too (finding 8)."""
    private = engine(steps=40)
    train(private, 5)
    early = copy.deepcopy(private.state_dict())
    train(private, 15)
    private.load_state_dict(early)
    assert torch.equal(next(private.model.parameters()), early["model"][next(iter(early["model"]))])
    assert train(private, 15) == 15
    assert private.steps_taken == 35
    assert private.guarantee == "certified"
    again = engine(steps=40)
    again.load_state_dict(early)
    assert again.steps_taken == 35
    assert again.privacy_spent() == private.privacy_spent()
    train(again, 2)
    assert private.steps_taken == 37


def test_a_later_state_brings_its_charges(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine looks at checkpoints of another process, one after the other: the weights of step 15 have cost 15 steps."""
    private, states = engine(steps=40), []
    for _ in range(3):
        train(private, 5)
        states.append(copy.deepcopy(private.state_dict()))
    monkeypatch.setattr("dpulr.parts.account._LEDGERS", {})  # as in a process of its own
    again = engine(steps=40)
    for number, steps in ((0, 5), (2, 15), (1, 15)):
        again.load_state_dict(states[number])
        assert again.steps_taken == steps
    assert again.privacy_spent() == private.privacy_spent()
    again.private_accuracy(blobs(), epsilon=0.1)
    spent = again.privacy_spent().epsilon
    again.load_state_dict(states[0])
    assert again.privacy_spent().epsilon == spent


def test_an_evaluation_is_not_forgotten_either() -> None:
    private = engine()
    private.private_accuracy(blobs(), epsilon=0.1)
    with pytest.raises(StepError, match="has charged a noisy evaluation"):
        private.load_state_dict(engine().state_dict())


def test_a_state_of_another_run_is_refused_once_steps_are_charged() -> None:
    private, other = engine(), engine()
    train(private, 2)
    with pytest.raises(StepError, match=r"another run .* engine\.parameters_changed\(public=True\)"):
        private.load_state_dict(other.state_dict())
    with pytest.raises(InvalidArgument, match="not the state of an engine: it has no 'model'"):
        private.load_state_dict(private.model.state_dict())
    assert private.steps_taken == 2


def test_a_step_of_ones_own_voids_the_guarantee() -> None:
    """loss.backward(); optimizer.step() left in the loop beside engine.step."""
    private = engine()
    for inputs, targets in private.batches():
        LOSS(private.model(inputs), targets).mean().backward()
        with pytest.warns(UserWarning, match=r"called beside engine.step\(\) \(test_misuse.py, line \d+\)"):
            private.optimizer.step()
        private.step(inputs, targets)
        break
    spent = private.privacy_spent()
    assert (private.guarantee, spent.guarantee, spent.epsilon) == ("none", "none", None)
    assert "optimizer.step() was called beside" in str(spent)
    assert train(private) == 3
    assert private.privacy_spent().guarantee == "none"
    resumed = engine()
    with pytest.warns(UserWarning, match="no guarantee any more"):
        resumed.load_state_dict(private.state_dict())
    assert resumed.guarantee == "none"


@pytest.mark.parametrize("way", ["in place", "data", "a slice of data", "numpy", "replaced"])
def test_parameters_changed_by_another_hand_void_the_guarantee(way: str) -> None:
    private = engine()
    train(private, 1)
    weight = next(private.model.parameters())
    with torch.no_grad():
        if way == "in place":
            weight.add_(1.0)
        elif way == "data":
            weight.data.add_(1.0)
        elif way == "a slice of data":
            weight.data[-1, -1] += 1e-3
        elif way == "numpy":
            weight.numpy()[-1, -1] += 1e-3
        else:
            weight.data = weight + 1.0
    with pytest.warns(UserWarning, match="parameters were changed between two steps"):
        train(private, 1)
    assert private.guarantee == private.privacy_spent().guarantee == "none"


def test_a_frozen_layer_that_is_trained_elsewhere_voids_the_guarantee() -> None:
    model = small_mlp()
    frozen = next(model.parameters()).requires_grad_(False)
    private = engine(model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    train(private, 1)
    with torch.no_grad():
        frozen.add_(1.0)
    with pytest.warns(UserWarning, match="parameters were changed between two steps"):
        train(private, 1)
    assert private.guarantee == "none"


def test_public_changes_are_said_to_be_so() -> None:
    private = engine()
    train(private, 1)
    private.model.load_state_dict(small_mlp().state_dict())
    private.parameters_changed(public=True)
    train(private)
    assert private.privacy_spent().guarantee == "certified"
    with pytest.warns(UserWarning, match="not public"):
        private.parameters_changed(public=False)
    assert private.guarantee == "none"


def test_a_state_goes_with_the_ledger_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash the ledger has four steps, the last checkpoint two. A run that begins to keep one takes along what is known."""
    path, other = tmp_path / "run" / "ledger.jsonl", tmp_path / "other" / "ledger.jsonl"
    private = engine(steps=10, ledger=path)
    train(private, 2)
    state = copy.deepcopy(private.state_dict())
    train(private, 2)
    private.ledger.lock.release()
    monkeypatch.setattr("dpulr.parts.account._LEDGERS", {})
    again = engine(steps=10, ledger=path)
    again.load_state_dict(state)
    assert torch.equal(next(again.model.parameters()), next(iter(state["model"].values())))
    assert again.steps_taken == 4
    train(again, 1)
    again.ledger.lock.release()
    assert engine(steps=10, ledger=path).steps_taken == 5
    begun = engine(steps=10, ledger=other)
    begun.load_state_dict(state)
    train(begun, 1)
    assert sum('"kind": "step"' in line for line in other.read_text().splitlines()) == 6


def test_a_ledger_on_disk_for_a_program_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.jsonl"
    private = engine(steps=10, ledger=path)
    train(private, 4)
    next(private.batches())
    assert sum('"kind": "step"' in line for line in path.read_text().splitlines()) == 5  # the waiting one, too
    with pytest.raises(PrivacyRefusal, match="another process"):
        engine(steps=10, ledger=str(path))
    private.ledger.lock.release()
    again = engine(steps=10, ledger=str(path))
    assert again.steps_taken == 5
    assert train(again) == 5
    assert again.privacy_spent().steps == 10
    with pytest.raises(InvalidArgument, match=r"ends in ledger\.jsonl"):
        engine(ledger=tmp_path / "other.txt")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("module", "first argument"), ("max_grad_norm", r"dpulr\.Gradient\(max_grad_norm"), ("repeats", r"HiddenDirection\(repeats")],
)
def test_names_of_elsewhere_are_explained(name: str, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        engine(**{name: 1})
    assert "target_epsilon" in inspect.signature(PrivacyEngine).parameters
