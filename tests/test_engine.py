"""The engine: batches, steps, what they are charged, when it stops, and what a checkpoint brings back."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

import dpulr
from dpulr import accounting
from dpulr.randomness import RandomSource

LOSS = nn.CrossEntropyLoss(reduction="none")


def blobs(records: int = 200, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Two clouds of points, one for each class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(records) % 2
    x = torch.randn(records, 4, generator=generator, dtype=dtype) + 3 * (y.to(dtype).unsqueeze(1) - 0.5)
    return TensorDataset(x, y)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return dpulr.models.mlp((4, 8, 2), seed=0).to(dtype)


def engine(network: nn.Module | None = None, optimizer: Any = None, data: Any = None, **settings: Any) -> dpulr.PrivacyEngine:
    network = model() if network is None else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1) if optimizer is None else optimizer
    defaults: dict[str, Any] = {"mechanism": dpulr.Gaussian(repeats=2), "steps": 4, "noise_multiplier": 1.0}
    if "sample_rate" not in settings:
        defaults["batch_size"] = 20
    return dpulr.PrivacyEngine(network, optimizer, blobs() if data is None else data, LOSS, **{**defaults, **settings})


def run(private: dpulr.PrivacyEngine, steps: int | None = None) -> int:
    taken = 0
    for x, y in private.batches(steps):
        private.step(x, y)
        taken += 1
    return taken


def gradient(private: dpulr.PrivacyEngine) -> Tensor:
    return torch.cat([p.grad.flatten() for p in private.model.parameters() if p.grad is not None]).clone()


# --- the whole ------------------------------------------------------------------------------------------------------------
def test_it_learns() -> None:
    network = model()
    private = engine(
        network,
        torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9),
        mechanism=dpulr.Gaussian(repeats=8),
        batch_size=50,
        steps=60,
        noise_multiplier=None,
        target_epsilon=8.0,
        target_delta=1e-3,
    )
    assert run(private) == 60
    spent = private.privacy_spent()
    assert spent.guarantee == "certified"
    assert spent.epsilon is not None
    assert 7.5 < spent.epsilon <= 8.0
    assert dpulr.evaluate(network, blobs()) > 0.9


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "Adagrad", "SGD"])
def test_any_optimizer(kind: str) -> None:
    network = model()
    before = [p.detach().clone() for p in network.parameters()]
    assert run(engine(network, getattr(torch.optim, kind)(network.parameters(), lr=0.01))) == 4
    assert all(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_float64_models() -> None:
    network = model(torch.float64)
    private = engine(network, data=blobs(dtype=torch.float64))
    run(private)
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in network.parameters())


def test_several_inputs_and_items_that_are_not_tensors() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.left(a) + self.right(b)

    items = [({"b": x.numpy(), "a": x}, int(y)) for x, y in blobs()]
    assert run(engine(Sum(), data=items)) == 4


def test_models_that_return_more_than_a_tensor() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.linear(x), "inputs": x}

    network = Both()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    private = dpulr.PrivacyEngine(
        network,
        optimizer,
        blobs(),
        lambda out, y: LOSS(out["logits"], y),
        mechanism="gaussian",
        batch_size=20,
        steps=2,
        noise_multiplier=1.0,
    )
    assert run(private) == 2


# --- batches and steps ----------------------------------------------------------------------------------------------------
def test_step_takes_the_current_batch_once() -> None:
    private = engine()
    x, y = blobs().tensors
    with pytest.raises(RuntimeError, match="takes the current batch"):
        private.step(x[:20], y[:20])
    for inputs, targets in private.batches(1):
        for wrong in ((inputs.clone(), targets), (inputs, targets.clone()), (inputs[:5], targets[:5]), (targets, inputs)):
            with pytest.raises(RuntimeError, match="takes the current batch"):
                private.step(*wrong)
        assert private.steps_taken == 0
        private.step(inputs, targets)
        with pytest.raises(RuntimeError, match="takes the current batch"):
            private.step(inputs, targets)
    assert private.steps_taken == 1


def test_no_batch_may_be_left_out() -> None:
    private = engine()
    loop = private.batches()
    first = next(loop)
    with pytest.raises(RuntimeError, match="was not given to step"):
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
    assert run(private) == 3


def test_an_empty_batch_gives_a_step_of_noise() -> None:
    private = engine(sample_rate=1e-9, expected_batch_size=5.0, steps=2, noise_multiplier=3.0, insecure_noise_seed=4)
    x, y = next(private.batches())
    assert x.shape == (0, 4)
    private.step(x, y)
    noise = torch.from_numpy(RandomSource(4).numpy("noise").standard_normal(private.bound.size))
    torch.testing.assert_close(gradient(private), (3.0 * noise / 5.0).float())
    assert private.steps_taken == 1


def test_the_denominator_is_a_public_constant() -> None:
    """Twice the expected size: half the gradient, whatever the realised sizes are. And it is not the realised size."""
    found = []
    for expected in (10.0, 20.0):
        private = engine(sample_rate=0.3, expected_batch_size=expected, insecure_noise_seed=1, noise_multiplier=0.0, steps=1)
        x, y = next(private.batches())
        assert len(x) not in (10, 20)
        private.step(x, y)
        found.append(gradient(private))
    torch.testing.assert_close(found[0], 2 * found[1])


@pytest.mark.parametrize("size", [100, 200])
def test_rate_steps_and_denominator_come_from_the_arguments(size: int) -> None:
    private = engine(data=blobs(size), sample_rate=0.1, expected_batch_size=30.0, steps=None, epochs=2)
    assert (private.sample_rate, private.expected_batch_size, private.planned_steps) == (0.1, 30.0, 20)
    short = engine(data=blobs(size), batch_size=20, steps=None, epochs=1)
    assert (short.sample_rate, short.expected_batch_size, short.planned_steps) == (20 / size, 20.0, size // 20)


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


# --- what it costs --------------------------------------------------------------------------------------------------------
def test_the_target_is_never_exceeded() -> None:
    private = engine(steps=None, noise_multiplier=2.0, target_epsilon=1.5)
    step = private.step_event
    run(private)
    taken = private.steps_taken
    assert taken == private.planned_steps
    assert private.privacy_spent().epsilon <= 1.5
    assert accounting.epsilon([accounting.Charge(step, taken + 1)], 1e-5) > 1.5
    assert run(private) == 0


def test_a_plan_just_above_the_target_is_cut() -> None:
    step = engine(noise_multiplier=2.0).step_event
    cost = accounting.epsilon([accounting.Charge(step, 50)], 1e-5)
    assert engine(noise_multiplier=2.0, steps=50, target_epsilon=cost * 1.0001).planned_steps == 50
    assert engine(noise_multiplier=2.0, steps=50, target_epsilon=cost * 0.9999).planned_steps == 49


def test_the_charge_is_what_was_done() -> None:
    private = engine(noise_multiplier=1.3)
    run(private)
    expected = accounting.gaussian_epsilon(noise_multiplier=1.3, sample_rate=0.1, steps=4, delta=1e-5)
    assert private.privacy_spent().epsilon == pytest.approx(expected)
    assert private.privacy_spent(1e-3).epsilon < expected
    noise = [engine(noise_multiplier=s, mechanism=dpulr.Gaussian(max_grad_norm=c)) for s, c in ((1.0, 1.0), (2.0, 1.0), (1.0, 3.0))]
    assert [private.bound.noise_std for private in noise] == [1.0, 2.0, 3.0]


def test_nothing_is_charged_before_the_first_step() -> None:
    private = engine()
    assert private.privacy_spent().epsilon == 0
    next(private.batches())
    assert private.steps_taken == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"insecure_noise_seed": 0}, "insecure_noise_seed"),
        ({"sampling": "shuffle"}, "shuffled"),
        ({"noise_multiplier": 0.0}, "no noise"),
        ({"insecure_noise_seed": 0, "noise_multiplier": None, "target_epsilon": 1.0}, "insecure_noise_seed"),
    ],
)
def test_what_voids_the_guarantee(settings: dict[str, Any], reason: str) -> None:
    private = engine(**settings)
    assert private.guarantee == "none"
    run(private, 1)
    spent = private.privacy_spent()
    assert (spent.guarantee, spent.epsilon) == ("none", None)
    assert reason in str(spent)


def test_a_run_without_seed_is_certified() -> None:
    private = engine()
    run(private)
    assert private.guarantee == private.privacy_spent().guarantee == "certified"


# --- randomness -----------------------------------------------------------------------------------------------------------
def test_noise_is_fresh_unless_a_seed_is_given() -> None:
    def one_step(**settings: Any) -> Tensor:
        torch.manual_seed(0)
        private = engine(steps=1, seed=3, **settings)
        run(private)
        return gradient(private)

    assert not torch.equal(one_step(), one_step())
    assert torch.equal(one_step(insecure_noise_seed=1), one_step(insecure_noise_seed=1))
    assert not torch.equal(one_step(insecure_noise_seed=1), one_step(insecure_noise_seed=2))


def test_batches_directions_and_noise_have_generators_of_their_own() -> None:
    private = engine()
    generators = [private._batch_rng, private._directions._rng, private._noise._rng]
    states = {generator.bit_generator.state["state"]["state"].tobytes() for generator in generators}
    assert len(states) == 3


def test_noise_has_the_stated_deviation_and_is_fresh_in_each_step() -> None:
    """Chi-square bounds on 20 steps of 58 numbers at a false-alarm rate of 1e-6."""
    private = engine(sample_rate=1e-9, expected_batch_size=4.0, steps=20, noise_multiplier=3.0)
    draws = []
    for batch in private.batches():
        private.step(*batch)
        draws.append(gradient(private) * 4.0 / 3.0)
    flat = torch.cat(draws)
    assert len(flat.unique()) == len(flat)
    assert abs(flat.square().mean() - 1) < 5 * math.sqrt(2 / len(flat))


# --- resuming -------------------------------------------------------------------------------------------------------------
def test_a_checkpoint_resumes_exactly_with_fresh_noise() -> None:
    first_model = model()
    first = engine(first_model, torch.optim.Adam(first_model.parameters(), lr=0.01), steps=6)
    run(first, 3)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    gradients = []
    for _ in range(2):
        network = dpulr.models.mlp((4, 8, 2), seed=9)
        second = engine(network, torch.optim.Adam(network.parameters(), lr=0.5), steps=6)
        buffer.seek(0)
        second.load_state_dict(torch.load(buffer, weights_only=True))
        assert all(torch.equal(a, b) for a, b in zip(first_model.parameters(), network.parameters(), strict=True))
        states = [pytree.tree_leaves(private.optimizer.state_dict()) for private in (first, second)]
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(*states, strict=True))
        assert second.ledger == first.ledger
        assert second.privacy_spent() == first.privacy_spent()
        assert run(second) == 3
        gradients.append(gradient(second))
    assert not torch.equal(*gradients)
    assert not any("rng" in key or "random" in key for key in first.state_dict())


def test_what_a_checkpoint_has_spent_shortens_the_plan() -> None:
    costly = engine(noise_multiplier=1.0, steps=10)
    run(costly)
    limits = {"noise_multiplier": 2.0, "target_epsilon": 3.0, "steps": 100}
    fresh, resumed = engine(**limits), engine(**limits)
    resumed.load_state_dict(costly.state_dict())
    run(fresh)
    run(resumed)
    assert fresh.steps_taken == 100
    assert 10 < resumed.steps_taken < 100
    assert resumed.privacy_spent().epsilon <= 3.0
    assert resumed.steps_taken == resumed.planned_steps


def test_a_void_checkpoint_stays_void() -> None:
    insecure = engine(insecure_noise_seed=0)
    run(insecure, 1)
    resumed = engine()
    resumed.load_state_dict(insecure.state_dict())
    run(resumed)
    assert resumed.privacy_spent().guarantee == "none"


def test_steps_taken_are_not_forgotten_by_loading() -> None:
    private = engine()
    start = private.state_dict()
    run(private, 2)
    with pytest.raises(RuntimeError, match="has taken 2 steps"):
        private.load_state_dict(start)
    assert private.steps_taken == 2


def test_a_pending_batch_does_not_pass_the_end_of_a_loaded_plan() -> None:
    done, private = engine(), engine()
    run(done)
    batch = next(private.batches())
    private.load_state_dict(done.state_dict())
    with pytest.raises(RuntimeError, match="all 4 planned steps"):
        private.step(*batch)


# --- the model ------------------------------------------------------------------------------------------------------------
def test_the_user_s_mode_does_not_matter() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)).eval()
    private = engine(network)
    network.train()
    run(private)
    assert network[1].num_batches_tracked == 0
    assert network[1].training


def test_gradients_from_elsewhere_are_not_applied() -> None:
    """A frozen parameter that the optimizer holds, with a gradient of some earlier, not private pass."""
    network = model()
    frozen = network[1].weight.requires_grad_(False)
    frozen.grad = torch.ones_like(frozen)
    before = frozen.clone()
    run(engine(network))
    assert torch.equal(frozen, before)


@pytest.mark.parametrize("space", ["output", "weight"])
def test_the_padding_row_stays(space: Any) -> None:
    network = nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Flatten(), nn.Linear(6, 2))
    before = network[0].weight.detach().clone()
    data = TensorDataset(torch.randint(5, (200, 2)), torch.arange(200) % 2)
    run(engine(network, data=data, mechanism=dpulr.Gaussian(repeats=2, space=space)))
    moved = (network[0].weight != before).any(1)
    assert moved.tolist() == [True, False, True, True, True]


def test_subspaces_release_less() -> None:
    whole, part = engine(), engine(mechanism=dpulr.Gaussian(repeats=2, subspace=3))
    assert part.bound.size < whole.bound.size
    run(part)
    weight = part.model[1].weight.grad
    assert torch.linalg.matrix_rank(weight) <= 3


# --- what a review found --------------------------------------------------------------------------------------------------
def test_a_batch_changed_in_place_is_refused() -> None:
    private = engine(model())
    x, y = next(private.batches())
    x.mul_(0)
    with pytest.raises(RuntimeError, match="changed in place"):
        private.step(x, y)


def test_a_ledger_without_guarantee_stays_without() -> None:
    loose = engine(model(), insecure_noise_seed=1)
    run(loose)
    again = engine(model(), steps=9)
    again.load_state_dict(loose.state_dict())
    assert again.guarantee == again.privacy_spent().guarantee == "none"
    with pytest.raises(ValueError, match="no target_epsilon can be met"):
        engine(model(), noise_multiplier=None, target_epsilon=2.0).load_state_dict(loose.state_dict())


@pytest.mark.parametrize("options", [{"rejection_threshold": "auto"}, {"rejection_threshold": 3}], ids=str)
def test_shuffled_batches_reject_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="nothing to reject"):
        engine(model(), sampling="shuffle", **options)
