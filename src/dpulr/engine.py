"""`PrivacyEngine`: private steps on a model that is never wrapped, with any torch optimizer.

A step reads like the picture in the README: sample, clean pass, replay under noise, signals, bound, sum, noise, optimizer. It stops
before the step that would exceed the target epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from dpulr import accounting
from dpulr.accounting.events import Charge, SampledStep, Unaccounted
from dpulr.arguments import (
    batch_constants,
    check_budget,
    check_labels,
    check_parameters,
    planned_steps,
    smaller_neighbour,
    whole,
)
from dpulr.mechanisms import Mechanism, by_name
from dpulr.mechanisms.base import Guarantee
from dpulr.model.prepare import prepare
from dpulr.model.row_independence import LossFunction
from dpulr.model.sites import find_layers
from dpulr.randomness import GaussianNoise, RandomSource
from dpulr.sampling import PoissonSampling, Records, ShuffledSampling

Batch = tuple[Any, Any]


class PrivacyEngine:
    """Trains `model` on `dataset` with differential privacy, by forward passes alone.

    Give either `target_epsilon` (the noise is calibrated to it) or `noise_multiplier`; with both, the engine stops before the
    step that would exceed the target. Give either `epochs` or `steps`. `batch_size` is the expected size of a batch and takes the
    size of the data set as public; where that is private, give `expected_batch_size` and `sample_rate` instead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any],
        loss_fn: LossFunction,
        *,
        mechanism: str | Mechanism = "hidden-direction",
        batch_size: int | None = None,
        expected_batch_size: float | None = None,
        sample_rate: float | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        target_epsilon: float | None = None,
        target_delta: float = 1e-5,
        noise_multiplier: float | None = None,
        sampling: Literal["poisson", "shuffle"] = "poisson",
        rejection_threshold: int | Literal["auto"] = 0,
        min_dataset_size: int | None = None,
        memory_limit: int | None = None,
        seed: int = 0,
        insecure_noise_seed: int | None = None,
        replay: Literal["auto", "trace", "hook"] = "auto",
    ) -> None:
        self.mechanism = by_name(mechanism)
        self.model, self.optimizer = model, optimizer
        self.target_epsilon, self.target_delta = target_epsilon, target_delta
        self.insecure = insecure_noise_seed is not None
        if memory_limit is not None:
            whole("memory_limit", memory_limit)
        whole("seed", seed, least=0)
        if insecure_noise_seed is not None:
            whole("insecure_noise_seed", insecure_noise_seed, least=0)
        check_budget(target_epsilon, target_delta, noise_multiplier, mechanism=self.mechanism)
        find_layers(model)  # names what can't be trained at all
        device = check_parameters(model, optimizer)
        self.records = Records(dataset, device)
        self.expected_batch_size, self.sample_rate = batch_constants(
            self.records.size, batch_size, expected_batch_size, sample_rate
        )
        self.planned_steps = planned_steps(epochs, steps, self.sample_rate, open_end=None not in (target_epsilon, noise_multiplier))

        self.forward = prepare(model, loss_fn, self.records.example, device, space=self.mechanism.space, method=replay)
        check_labels(model, loss_fn, self.records, device)
        self.bound = self.mechanism.bind(self.forward, memory_limit=memory_limit, seed=seed)
        if rejection_threshold != 0 and batch_size is None and min_dataset_size is None:
            raise ValueError(
                "rejection_threshold with a private size of the data set needs min_dataset_size, a public lower bound."
            )
        self.min_dataset_size = smaller_neighbour(self.records.size, min_dataset_size)
        if rejection_threshold == "auto" and self.mechanism.guarantee != "certified":
            raise ValueError(f"rejection_threshold='auto' weighs epsilon, and {self.mechanism.name} has none: give a number.")
        self.sampler: PoissonSampling | ShuffledSampling = self._sampler(sampling, rejection_threshold)
        if self._threshold and self.bound.rejection_threshold not in (None, self._threshold):
            raise ValueError("the mechanism and the engine have different rejection thresholds: give one of the two.")
        self.sampler = self._own_sampler()
        noise_multiplier = self._own_noise(noise_multiplier)
        self.noise_multiplier = self._calibrated() if noise_multiplier is None else float(noise_multiplier)
        if rejection_threshold == "auto":
            self.sampler = PoissonSampling(self.sample_rate, self._auto_threshold())
            self.noise_multiplier = self._calibrated() if noise_multiplier is None else self.noise_multiplier
        self.bound.use(self.noise_multiplier)
        self.step_event = self._event()
        self.ledger = accounting.Ledger()
        self._limit_steps()

        source = RandomSource(insecure_noise_seed)
        self._batch_rng = source.numpy("batches")
        self._directions = source.directions(device, self.bound.dtype)
        self._noise = GaussianNoise(self.bound.size, source.numpy("noise"))
        self._gradients = [{name: torch.zeros_like(p) for name, p in site.parameters.items()} for site in self.forward.sites]
        self._gradient_of = {
            parameter: views[name]
            for site, views in zip(self.forward.sites, self._gradients, strict=True)
            for name, parameter in site.parameters.items()
        }
        self._current: Batch | None = None
        self._versions: list[int] = []

    # --- training -----------------------------------------------------------------------------------------------------
    def batches(self, steps: int | None = None) -> Iterator[Batch]:
        """Private batches, each for one `step`: all that the plan still allows, or the next `steps` of them."""
        end = self.planned_steps if steps is None else min(self.planned_steps, self.steps_taken + steps)
        while self.steps_taken < end:
            if self._current is None:  # a batch that another loop left behind is not drawn again: that would be a choice
                self._begin()
                self._current = self.records.take(self.sampler.draw(self.records.size, self._batch_rng))
                self._versions = _versions(self._current)
            yield self._current
            if self._current is not None:
                raise RuntimeError(
                    "the last batch was not given to step(). Every batch goes through step(), empty ones too: leaving some out "
                    "would make the sampling depend on the data."
                )

    def step(self, inputs: Any, targets: Any) -> None:
        """One private step on the current batch of `batches()`, which is used up by it. It is charged first."""
        if self._current is None or inputs is not self._current[0] or targets is not self._current[1]:
            raise RuntimeError(
                "step() takes the current batch of engine.batches(), once, as it came. Another batch, or one used twice, was not "
                "sampled the way the guarantee assumes."
            )
        if _versions(self._current) != self._versions:
            raise RuntimeError("the batch was changed in place since it was drawn. step() takes it as it came.")
        if self.steps_taken >= self.planned_steps:
            raise RuntimeError(f"all {self.planned_steps} planned steps are taken; this one would exceed the budget.")
        self._current = None
        self.ledger.append(self.step_event)
        self._noise.prepare()
        with torch.inference_mode(), torch.autocast(self.records.device.type, enabled=False), self.forward.checked_mode():
            total = self.bound.total(inputs, targets, self._directions)
            noise = self._noise.draw().to(total.device)
            denominator = self.bound.denominator(self.expected_batch_size, self._threshold)
            self.bound.gradients(self.bound.release(total, noise, denominator), self._gradients)
        for site, views in zip(self.forward.sites, self._gradients, strict=True):
            site.rule.leave_untrained(views)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:  # whatever else stood there did not come from this step
                parameter.grad = self._gradient_of.get(parameter)
        self.optimizer.step()

    def _begin(self) -> None:
        """Settings of the mechanism that change from step to step."""
        self.bound.step = self.steps_taken
        if self.bound.varies:
            own = self.bound.own_noise
            self.sampler, self.noise_multiplier = self._own_sampler(), self.noise_multiplier if own is None else own
            self.step_event = self._event()

    # --- privacy ------------------------------------------------------------------------------------------------------
    @property
    def steps_taken(self) -> int:
        return self.ledger.steps

    @property
    def guarantee(self) -> Guarantee:
        """What the epsilon of this run is worth, all of its ledger included."""
        void = self._void() is not None or any(isinstance(charge.step, Unaccounted) for charge in self.ledger.charges)
        return "none" if void else self.mechanism.guarantee

    def privacy_spent(self, delta: float | None = None) -> accounting.PrivacySpent:
        """What the steps so far have cost, as numbers and, printed, as a sentence."""
        delta = self.target_delta if delta is None else delta
        void = self._void() if self.mechanism.guarantee != "certified" and self.steps_taken else None
        return accounting.privacy_spent(self.ledger.charges, delta, reasons=[] if void is None else [void])

    def _event(self) -> SampledStep | Unaccounted:
        """What one step is charged as."""
        reason = self._void()
        nominal = self.mechanism.guarantee != "certified" and self.noise_multiplier > 0  # never certified: only a formula's value
        return self._sampled(self.noise_multiplier) if reason is None or nominal else Unaccounted(reason)

    def _void(self) -> str | None:
        """Why no step of this run has a guarantee, if so."""
        if self.insecure:
            return "the noise comes from a seed (insecure_noise_seed)"
        if not self.sampler.private:
            return "batches were shuffled, not sampled"
        if self.noise_multiplier == 0:
            return self.bound.without_noise
        return None

    @property
    def _threshold(self) -> int:
        return self.sampler.rejection_threshold if isinstance(self.sampler, PoissonSampling) else 0

    def _sampled(self, noise_multiplier: float) -> SampledStep:
        return SampledStep(
            self.bound.event_at(noise_multiplier),
            self.sample_rate,
            self._threshold,
            self.min_dataset_size if self._threshold else None,
        )

    def _sampler(self, sampling: str, rejection_threshold: int | Literal["auto"]) -> PoissonSampling | ShuffledSampling:
        if sampling == "shuffle":
            if rejection_threshold != 0 or self.expected_batch_size < 1:
                raise ValueError("shuffled batches have a fixed size of at least 1: there is nothing to reject.")
            return ShuffledSampling(round(self.expected_batch_size))
        if sampling != "poisson":
            raise ValueError(f"sampling is {sampling!r}; it must be 'poisson' or 'shuffle'.")
        sampler = PoissonSampling(self.sample_rate, 0 if rejection_threshold == "auto" else rejection_threshold)
        sampler.check(self.min_dataset_size)
        return sampler

    def _own_sampler(self) -> PoissonSampling | ShuffledSampling:
        """The sampler, with the threshold of the mechanism if it has one."""
        threshold = self.bound.rejection_threshold
        if threshold is None:
            return self.sampler
        if not isinstance(self.sampler, PoissonSampling):
            raise ValueError("shuffled batches have a fixed size of at least 1: there is nothing to reject.")
        sampler = PoissonSampling(self.sample_rate, threshold)
        sampler.check(self.min_dataset_size)
        return sampler

    def _own_noise(self, given: float | None) -> float | None:
        """The noise of the mechanism if it has one, else what was given."""
        own = self.bound.own_noise
        if own is not None and given not in (None, own):
            raise ValueError(f"the mechanism has target_std {own:g} and noise_multiplier is {given:g}: give one of the two.")
        return given if own is None else own

    def _auto_threshold(self) -> int:
        return accounting.auto_rejection_threshold(
            self.bound.event_at(self.noise_multiplier),
            sample_rate=self.sample_rate,
            steps=self.planned_steps,
            delta=self.target_delta,
            min_dataset_size=self.min_dataset_size,
        )

    def _calibrated(self) -> float:
        """The least noise with which the planned steps stay within the target."""
        assert self.target_epsilon is not None
        sampled = self._sampled(1.0)
        return accounting.calibrate_release(
            self.bound.event_at,
            target_epsilon=self.target_epsilon,
            delta=self.target_delta,
            sample_rate=self.sample_rate,
            steps=self.planned_steps,
            rejection_threshold=sampled.rejection_threshold,
            min_dataset_size=sampled.min_dataset_size,
        )

    def _limit_steps(self) -> None:
        """Never plan a step that would exceed the target on top of what the ledger holds."""
        if self.target_epsilon is None or self.noise_multiplier == 0:
            return
        step, spent = self._sampled(self.noise_multiplier), self.ledger.charges
        allowed = max(0, self.planned_steps - self.steps_taken)
        if accounting.epsilon([*spent, Charge(step, allowed)], self.target_delta) > self.target_epsilon:
            allowed = accounting.max_steps(step, target_epsilon=self.target_epsilon, delta=self.target_delta, already=spent)
        if allowed + self.steps_taken == 0:
            raise ValueError(
                f"not one step fits: with noise_multiplier={self.noise_multiplier} and sample_rate={self.sample_rate:.3g} the "
                f"first step costs more than target_epsilon={self.target_epsilon}. Add noise or raise the target."
            )
        self.planned_steps = self.steps_taken + allowed

    # --- resuming -----------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizer and accounting. No random state: noise, directions and batches always start afresh."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ledger": self.ledger.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run: what its ledger holds counts as spent. The plan shrinks if the target would be exceeded."""
        if self.steps_taken > 0:
            raise RuntimeError(
                f"this engine has taken {self.steps_taken} steps, which the loaded ledger does not hold: their cost would be "
                "forgotten. Load into a new engine."
            )
        self.use_ledger(accounting.Ledger.from_dict(state["ledger"]))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def use_ledger(self, ledger: accounting.Ledger) -> None:
        """Charge the steps to this ledger, one on disk for example. What it holds counts as spent."""
        if self.steps_taken > 0:
            raise RuntimeError(f"this engine has taken {self.steps_taken} steps that the other ledger does not hold.")
        unaccounted = [charge.step.reason for charge in ledger.charges if isinstance(charge.step, Unaccounted)]
        if unaccounted and self.target_epsilon is not None and self._void() is None:
            raise ValueError(f"no target_epsilon can be met on top of a ledger without a guarantee: {unaccounted[0]}.")
        self.ledger = ledger
        if any(charge.step != self.step_event for charge in self.ledger.charges):
            self._limit_steps()


def _versions(batch: Batch) -> list[int]:
    """How often each tensor of the batch has been changed in place."""
    return [leaf._version for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_inference()]
