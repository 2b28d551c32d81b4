"""The engine: batches, steps, what it makes public, where its randomness comes from, and what a checkpoint brings back."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

import dpulr
from dpulr.engine import Released
from dpulr.errors import Advice, BudgetError, InvalidArgument, StepError
from dpulr.randomness import GaussianNoise, RandomSource
from tests.support.core import LOSS, Kept, accuracy, blobs, engine, gradient, rounded, small_mlp, state_of, train


# --- the whole ------------------------------------------------------------------------------------------------------------
def test_it_learns() -> None:
    network = small_mlp()
    private = engine(
        network,
        optimizer=torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9),
        mechanism=dpulr.Gaussian(repeats=8),
        batch_size=50,
        steps=60,
        noise_multiplier=None,
        target_epsilon=8.0,
        target_delta=1e-3,
    )
    assert train(private) == 60
    spent = private.privacy_spent()
    assert spent.guarantee == "certified"
    assert spent.epsilon is not None
    assert 7.5 < spent.epsilon <= 8.0
    assert accuracy(network, blobs()) > 0.9


def test_advice_is_given_once_and_only_for_runs_that_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpulr.parts.setup._ADVISED", [])

    def said(**changes: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            private = engine(small_mlp(), **{"insecure_noise_seed": None, "mechanism": "hidden-direction", "steps": 50, **changes})
            for _ in range(2):
                assert not [warning for warning in caught if warning.category is Advice]  # not before the first step
                private.step(*next(private.batches()))
        assert all(warning.filename == __file__ for warning in caught if warning.category is Advice)
        return [str(warning.message) for warning in caught if warning.category is Advice]

    assert said(steps=49) == said(mechanism="gradient") == said(insecure_noise_seed=1) == []
    (sentence,) = said()
    assert "can be differentiated from end to end: mechanism 'gradient'" in sentence
    assert said() == []


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "Adagrad", "SGD"])
def test_any_optimizer(kind: str) -> None:
    network = small_mlp()
    before = [p.detach().clone() for p in network.parameters()]
    assert train(engine(network, optimizer=getattr(torch.optim, kind)(network.parameters(), lr=0.01))) == 4
    assert all(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_float64_models() -> None:
    network = small_mlp(torch.float64)
    private = engine(network, data=blobs(dtype=torch.float64))
    train(private)
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in network.parameters())


def test_several_inputs_and_items_that_are_not_tensors() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.left(a) + self.right(b)

    items = [({"b": x.numpy(), "a": x}, int(y)) for x, y in blobs()]
    assert train(engine(Sum(), data=items)) == 4


def test_models_that_return_more_than_a_tensor() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.linear(x), "inputs": x}

    assert train(engine(Both(), loss_fn=lambda out, y: LOSS(out["logits"], y), mechanism="gaussian")) == 4


# --- batches and steps ----------------------------------------------------------------------------------------------------
def test_step_takes_the_current_batch_once() -> None:
    private = engine()
    x, y = blobs().tensors
    with pytest.raises(StepError, match="takes the current batch"):
        private.step(x[:20], y[:20])
    for inputs, targets in private.batches(1):
        for wrong in ((inputs.clone(), targets), (inputs, targets.clone()), (inputs[:5], targets[:5]), (targets, inputs)):
            with pytest.raises(StepError, match="takes the current batch"):
                private.step(*wrong)
        assert private.steps_taken == 0
        private.step(inputs, targets)
        with pytest.raises(StepError, match="takes the current batch"):
            private.step(inputs, targets)
    assert private.steps_taken == 1


def test_what_is_done_to_a_batch_has_no_effect() -> None:
    """The engine computes on its own copy: neither what was handed out nor the data can be changed through it."""
    found = []
    for spoil in (False, True):
        private = engine(steps=1, insecure_noise_seed=2)
        x, y = next(private.batches())
        if spoil:
            x.mul_(0), y.fill_(1)
        private.step(x, y)
        found.append(gradient(private.model))
    assert torch.equal(*found)


def test_no_batch_may_be_left_out() -> None:
    private = engine()
    loop = private.batches()
    first = next(loop)
    with pytest.raises(StepError, match="was not given to step"):
        next(loop)
    again = next(private.batches())  # a new loop starts with the batch that was left behind
    assert again[0] is first[0]
    private.step(*again)
    assert next(private.batches())[0] is not first[0]


def test_a_step_is_charged_even_if_it_fails() -> None:
    class Fails(nn.Module):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise OSError("the black box is down")
            return x

    network = nn.Sequential(Fails(), nn.Linear(4, 2))
    private = engine(network)
    network[0].broken = True
    with pytest.raises(OSError, match="the black box is down"):
        private.step(*next(private.batches()))
    assert private.steps_taken == 1
    network[0].broken = False
    assert train(private) == 3


def test_nothing_is_charged_before_the_first_step() -> None:
    private = engine()
    assert private.privacy_spent().epsilon == 0
    next(private.batches())
    assert private.steps_taken == 0


def test_an_empty_batch_gives_a_step_of_noise() -> None:
    private = engine(sample_rate=1e-9, expected_batch_size=5.0, steps=2, noise_multiplier=3.0, insecure_noise_seed=4)
    x, y = next(private.batches())
    assert x.shape == (0, 4)
    private.step(x, y)
    noise = 3.0 * torch.from_numpy(RandomSource(4).numpy("noise").standard_normal(private.fitted.size))
    torch.testing.assert_close(gradient(private.model), (rounded(noise, 3.0) / 5.0).float())
    assert private.steps_taken == 1


def test_the_denominator_is_a_public_constant() -> None:
    """Twice the expected size: half the gradient, whatever the realised sizes are. And it is not the realised size."""
    found = []
    for expected in (10.0, 20.0):
        settings = {"sample_rate": 0.3, "expected_batch_size": expected, "insecure_noise_seed": 1, "noise_multiplier": 0.0}
        private = engine(mechanism="gradient", steps=1, **settings)  # nothing drawn: the same batch has the same sum
        x, y = next(private.batches())
        assert len(x) not in (10, 20)
        private.step(x, y)
        found.append(gradient(private.model))
    torch.testing.assert_close(found[0], 2 * found[1])


def test_batch_sizes_vary() -> None:
    private = engine(steps=30)
    sizes = set()
    for x, y in private.batches():
        sizes.add(len(x))
        private.step(x, y)
    assert len(sizes) > 5


def test_rejection_redraws_small_batches() -> None:
    private = engine(rejection_threshold=18, steps=30, target_delta=0.1, batch_size=20)
    for x, y in private.batches():
        assert len(x) >= 18
        private.step(x, y)
    charged = private.ledger.charges[0].step
    assert (charged.rejection_threshold, charged.min_dataset_size) == (18, 199)


def test_shuffled_batches_have_a_fixed_size() -> None:
    private = engine(sampling="shuffle", batch_size=40, steps=5)
    rows = []
    for x, y in private.batches():
        rows += x.tolist()
        private.step(x, y)
    assert sorted(rows) == sorted(blobs().tensors[0].tolist())


# --- what a step makes public ---------------------------------------------------------------------------------------------
def test_observers_see_the_noised_sum_before_it_is_divided() -> None:
    seen: list[Released] = []
    private = engine(steps=3, batch_size=20, mechanism=dpulr.Gaussian(repeats=2, subspace=3))
    stop = private.on_release(seen.append)
    train(private, 2)
    assert [released.step for released in seen] == [0, 1]
    assert all(released.values.dtype == torch.float64 and len(released.values) == private.fitted.size for released in seen)
    into = [{name: torch.zeros_like(p) for name, p in site.parameters.items()} for site in private.forward.sites]
    with torch.inference_mode():
        private.fitted.gradients(seen[-1].values, seen[-1].public, into)
    expected = torch.cat([part.flatten() for parts in into for part in parts.values()])
    assert torch.equal(expected, gradient(private.model))
    stop()
    train(private)
    assert len(seen) == 2


def test_observers_can_t_change_a_step() -> None:
    found = []
    for spoil in (False, True):
        private = engine(steps=1, insecure_noise_seed=3)
        if spoil:
            private.on_release(lambda released: released.values.zero_())
        train(private)
        found.append(gradient(private.model))
    assert torch.equal(*found)


# --- randomness -----------------------------------------------------------------------------------------------------------
def test_noise_is_fresh_unless_a_seed_is_given() -> None:
    def one_step(**settings: Any) -> Tensor:
        torch.manual_seed(0)
        private = engine(steps=1, seed=3, **settings)
        train(private)
        return gradient(private.model)

    assert not torch.equal(one_step(), one_step())
    assert torch.equal(one_step(insecure_noise_seed=1), one_step(insecure_noise_seed=1))
    assert not torch.equal(one_step(insecure_noise_seed=1), one_step(insecure_noise_seed=2))


def test_batches_directions_and_noise_have_generators_of_their_own() -> None:
    source = Kept()
    engine(randomness=source)
    assert set(source.streams) == {"batches", "directions", "noise"}
    assert len({state_of(stream) for stream in source.streams.values()}) == 3


def test_noise_has_the_stated_deviation_and_is_fresh_in_each_step() -> None:
    """Batches are empty, so that releases are noise. Within 5 standard errors on 20 steps of 58 numbers: false alarms 6e-7."""
    private = engine(sample_rate=1e-9, expected_batch_size=4.0, steps=20, noise_multiplier=3.0)
    draws: list[Tensor] = []
    private.on_release(lambda released: draws.append(released.values / 3.0))
    train(private)
    flat = torch.cat(draws)
    assert len(flat) == 20 * 58
    assert len(torch.stack(draws).unique(dim=0)) == 20
    assert abs(flat.square().mean() - 1) < 5 * math.sqrt(2 / len(flat))


def test_a_model_s_own_randomness_is_secret_in_a_step() -> None:
    """Dropout masks that follow from a public seed would tell how a record was perturbed."""

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(tuple(torch.rand(3).tolist()))  # three together don't meet by chance
            return x

    seen: list[tuple[float, ...]] = []
    found = []
    for _ in range(2):
        private = engine(nn.Sequential(Draws(), nn.Linear(4, 2)), mechanism="zeroth-order", steps=1)
        batch = next(private.batches())
        torch.manual_seed(0)
        seen.clear()
        private.step(*batch)
        found.append(set(seen))
        after = torch.rand(())
        torch.manual_seed(0)
        assert after == torch.rand(())  # what the user draws goes on as if there had been no step
    assert not found[0] & found[1]


# --- what the guarantee rests on ------------------------------------------------------------------------------------------
def test_another_source_of_randomness_is_used_and_voids_the_guarantee() -> None:
    """A subclass without noise: what is released is the sum itself, and nothing is certified."""

    class Silent(RandomSource):
        def noise(self, size: int) -> GaussianNoise:
            noise = super().noise(size)
            noise.draw = lambda: torch.zeros(size, dtype=torch.float64)  # type: ignore[method-assign]
            return noise

    private = engine(sample_rate=1e-9, expected_batch_size=5.0, steps=1, randomness=Silent())
    assert private.guarantee == "none"
    train(private)
    assert not gradient(private.model).any()
    spent = private.privacy_spent()
    assert (spent.epsilon, spent.guarantee) == (None, "none")
    assert "a source of one's own (randomness)" in str(spent)
    with pytest.raises(InvalidArgument, match="insecure_noise_seed or randomness, not both"):
        engine(randomness=RandomSource(), insecure_noise_seed=1)


def test_a_run_without_seed_is_certified() -> None:
    private = engine()
    train(private)
    assert private.guarantee == private.privacy_spent().guarantee == "certified"


# --- resuming -------------------------------------------------------------------------------------------------------------
def test_a_checkpoint_resumes_exactly_with_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    first_model = small_mlp()
    first = engine(first_model, optimizer=torch.optim.Adam(first_model.parameters(), lr=0.01), steps=6)
    train(first, 3)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    gradients = []
    for _ in range(2):
        network = dpulr.models.mlp((4, 8, 2), seed=9)
        second = engine(network, optimizer=torch.optim.Adam(network.parameters(), lr=0.5), steps=6)
        buffer.seek(0)
        monkeypatch.setattr("dpulr.parts.account._LEDGERS", {})  # as in a process of its own
        second.load_state_dict(torch.load(buffer, weights_only=True))
        assert all(torch.equal(a, b) for a, b in zip(first_model.parameters(), network.parameters(), strict=True))
        states = [pytree.tree_leaves(private.optimizer.state_dict()) for private in (first, second)]
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(*states, strict=True))
        assert second.ledger == first.ledger
        assert second.privacy_spent() == first.privacy_spent()
        assert train(second) == 3
        gradients.append(gradient(second.model))
    assert not torch.equal(*gradients)
    assert not any("rng" in key or "random" in key for key in first.state_dict())


def test_a_void_checkpoint_stays_void() -> None:
    insecure = engine(insecure_noise_seed=0)
    train(insecure, 1)
    resumed = engine()
    resumed.load_state_dict(insecure.state_dict())
    train(resumed)
    assert resumed.privacy_spent().guarantee == "none"


def test_a_ledger_without_guarantee_stays_without() -> None:
    loose = engine(insecure_noise_seed=1)
    train(loose)
    again = engine(steps=9)
    again.load_state_dict(loose.state_dict())
    assert again.guarantee == again.privacy_spent().guarantee == "none"
    with pytest.raises(BudgetError, match="no target_epsilon can be met"):
        engine(noise_multiplier=None, target_epsilon=2.0).load_state_dict(loose.state_dict())


def test_a_pending_batch_is_charged() -> None:
    """It was charged before it was read; a loop that leaves it behind has still read it."""
    private = engine()
    next(private.batches())
    assert (private.steps_taken, private.ledger.steps) == (0, 1)
    batch = next(private.batches())
    assert private.ledger.steps == 1
    private.step(*batch)
    assert (private.steps_taken, private.ledger.steps) == (1, 1)


# --- the model ------------------------------------------------------------------------------------------------------------
def test_the_user_s_mode_does_not_matter() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)).eval()
    private = engine(network)
    network.train()
    train(private)
    assert network[1].num_batches_tracked == 0
    assert network[1].training


def test_gradients_from_elsewhere_are_not_applied() -> None:
    """A frozen parameter that the optimizer holds, with a gradient of some earlier, not private pass."""
    network = small_mlp()
    frozen = network[1].weight.requires_grad_(False)
    frozen.grad = torch.ones_like(frozen)
    before = frozen.clone()
    train(engine(network))
    assert torch.equal(frozen, before)


@pytest.mark.parametrize("space", ["output", "weight"])
def test_the_padding_row_stays(space: Any) -> None:
    network = nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Flatten(), nn.Linear(6, 2))
    before = network[0].weight.detach().clone()
    data = TensorDataset(torch.randint(5, (200, 2)), torch.arange(200) % 2)
    train(engine(network, data=data, mechanism=dpulr.Gaussian(repeats=2, space=space)))
    moved = (network[0].weight != before).any(1)
    assert moved.tolist() == [True, False, True, True, True]


def test_subspaces_release_less() -> None:
    whole, part = engine(), engine(mechanism=dpulr.Gaussian(repeats=2, subspace=3))
    assert part.fitted.size < whole.fitted.size
    train(part)
    weight = part.model[1].weight.grad
    assert torch.linalg.matrix_rank(weight) <= 3
