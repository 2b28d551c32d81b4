"""Settings by public arithmetic: batch size, repeats, learning rate, schedule and momentum, from what is known before any record
is seen: the budget, the number of records, how long to train, and the shapes of the model. No torch.

Three quantities decide. The *shift* mu is what epsilon and delta allow all steps together to give away. Noise moves the weights by
learning rate x sqrt(steps) x noise / batch, which is about steps / (mu x records) per unit of learning rate, whatever the batch.
And what a layer makes of a moved weight grows with the square root of its inputs. Hidden directions have a fourth one, their own
*scatter*: the fewer directions a record has, the further they lead astray, and a larger budget does not help. The constants were
fitted on Fashion-MNIST and on synthetic tables (`python -m reproduction auto-fit`), on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from dpulr import search
from dpulr.accounting.small_signal import likely_noise, likely_shift, mean_overlap
from dpulr.plan import steps_of

Auto = Literal["auto"]
MOMENTUM, SCHEDULE, EPOCHS = 0.9, "cosine", 10.0


@dataclass(frozen=True)
class Constants:
    """Fitted. `largest`: the learning rate without noise, times the square root of the inputs. `movement`: how far noise may move
    what a layer puts out. `steps`: how many steps are worth taking, as a multiple of those at which noise halves the rate, but at
    least the `fewest`. `scatter`: the variance of a weight by one hidden direction of a record, where its gradient has length 1."""

    largest: float
    movement: float
    steps: float
    scatter: float = 0.0
    fewest: int = 250


FITTED = {
    "linear": Constants(largest=384.0, movement=0.3, steps=1.0),
    "deep": Constants(largest=64.0, movement=0.4, steps=2.0),
    "hidden": Constants(largest=32.0, movement=1.4, steps=2.0, scatter=0.1, fewest=90),
}
MOST_STEPS, SMALLEST_BATCH, LARGEST_SHARE = 1_500, 32, 1 / 3
_AFFORDABLE = 2e6  # multiplications of all repeats of a record
_FEW, _MANY, _TIMES_EVEN = 4, 32, 2.0


@dataclass(frozen=True)
class Layer:
    """The public shape of a trained layer: inputs of an output (bias included), parameters, positions that share them."""

    fan_in: int
    parameters: int
    positions: int = 1

    @property
    def outputs(self) -> int:
        return max(1, round(self.parameters / self.fan_in))

    @property
    def in_weights(self) -> bool:
        """Whether hidden directions move its weights: where they are fewer than its outputs."""
        return self.outputs * self.positions > self.parameters

    def dim(self, repeats: int) -> int:
        """Of a hidden direction."""
        width, positions = (self.parameters, 1) if self.in_weights else (self.outputs, self.positions)
        return min(width, subspace_for(repeats)) * positions


@dataclass(frozen=True)
class Task:
    """What is known in advance. Give `epochs` or `steps`; None for both: `EPOCHS`. `epsilon` None: the noise is given instead."""

    mechanism: str
    records: int
    layers: tuple[Layer, ...]
    epsilon: float | None = 1.0
    delta: float = 1e-5
    epochs: float | None = None
    steps: int | None = None
    noise_multiplier: float | None = None
    adaptive: bool = False
    """Whether the optimizer divides by the size of what it has seen, as Adam does."""

    @property
    def shift(self) -> float:
        """mu: two unit normals so far apart have this epsilon and delta."""
        return likely_shift(1.0 if self.epsilon is None else self.epsilon, self.delta or 1e-5)

    @property
    def constants(self) -> Constants:
        """A single layer has a convex loss, and takes larger steps."""
        if self.hides:
            return FITTED["hidden"]
        return FITTED["linear" if len(self.layers) == 1 else "deep"]

    @property
    def hides(self) -> bool:
        return self.mechanism == "hidden-direction"

    @property
    def fan_in(self) -> int:
        return sum(layer.fan_in for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)


@dataclass(frozen=True)
class Choice:
    """What was chosen, what it rests on, and `why`: a sentence for each."""

    batch_size: int
    steps: int
    repeats: int
    learning_rate: float
    momentum: float
    schedule: str
    outlook: float
    """The share of what training without noise gains over guessing that is to be expected: a rule of thumb."""
    why: dict[str, str] = field(compare=False, default_factory=dict)

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        return scheduled(self.learning_rate, self.schedule, step / max(steps, 1))

    def text(self) -> str:
        """All choices, a line each."""
        values = asdict(self)
        return "\n".join(f"{name.replace('_', ' ')} {_shown(values[name])}: {sentence}" for name, sentence in self.why.items())


def choose(task: Task, *, batch_size: int | None = None, repeats: int | None = None) -> Choice:
    """The settings for a task. What is given is kept, and the others are chosen to fit it."""
    why: dict[str, str] = {}
    count = repeats or _repeats(task, batch_size, why)
    batch = batch_size or batch_size_for(task, why, repeats=count)
    steps = task.steps or steps_of(task.epochs or EPOCHS, min(1.0, batch / task.records))
    learning_rate = _learning_rate(task, steps, batch, count, why)
    why["momentum"] = "a mean over about ten steps, over which noise averages out and the gradient does not."
    why["schedule"] = "half a cosine down to 0: the last steps are small, so that their noise does not stay in the weights."
    share = outlook(task)
    why["outlook"] = (
        f"signal to noise {task.shift * task.records / math.sqrt(task.parameters):.2g} (shift {task.shift:.2g} x {task.records:,} "
        f"records / sqrt({task.parameters:,} parameters)): about {share:.0%} of what training without noise gains over guessing."
    )
    return Choice(batch, steps, count, learning_rate, MOMENTUM, SCHEDULE, round(share, 2), why)


def scheduled(learning_rate: float, schedule: str, share: float) -> float:
    """The learning rate after a share of the steps."""
    return learning_rate if schedule == "constant" else learning_rate * (1 + math.cos(math.pi * share)) / 2


def outlook(task: Task) -> float:
    """What share of the gain over guessing is left: 1 / (1 + (1.5 / r)^1.2), r the signal to noise of the whole run."""
    ratio = task.shift * task.records / math.sqrt(max(1, task.parameters))
    return 1 / (1 + math.pow(1.5 / ratio, 1.2))


def warnings_for(task: Task) -> list[str]:
    """What should be said before a run that can hardly learn, in sentences."""
    share = outlook(task)
    if share >= 0.5 or task.epsilon is None:
        return []
    smaller = int(task.parameters * (task.shift * task.records / math.sqrt(task.parameters) / 1.5) ** 2)
    return [
        f"epsilon {task.epsilon:g} with {task.records:,} records and {task.parameters:,} parameters: no setting learns well here. "
        f"Expect about {share:.0%} of what training without noise gains over guessing. More records, a larger epsilon, or a "
        f"smaller model (about {max(1, smaller):,} parameters would keep half) help; public features do, too (dpulr.features)."
    ]


# --- one rule each --------------------------------------------------------------------------------------------------------
def subspace_for(repeats: int) -> int:
    """Dimensions of the public subspaces in which so many directions of a record lie."""
    return max(16, 4 * repeats)


def batch_size_for(task: Task, why: dict[str, str] | None = None, *, repeats: int | None = None) -> int:
    """As many steps as can be used: more of them only get smaller, fewer leave budget unused."""
    epochs = task.epochs or EPOCHS
    fewest = task.constants.fewest
    useful = task.constants.steps * _steps_at_half_rate(task, epochs, repeats)
    wanted = min(max(fewest, useful), MOST_STEPS)
    if task.steps is not None:
        epochs, wanted = task.epochs or max(EPOCHS, task.steps / wanted), task.steps
    size = epochs * task.records / wanted
    size = min(max(size, SMALLEST_BATCH), max(SMALLEST_BATCH, LARGEST_SHARE * task.records))
    size = min(task.records, _round(size))
    (why if why is not None else {})["batch_size"] = (
        f"about {wanted:,.0f} steps can be used at this budget ({fewest} to {MOST_STEPS:,}), and {epochs:g} epochs of "
        f"{task.records:,} records are shared among them."
    )
    return int(size)


def _steps_at_half_rate(task: Task, epochs: float, repeats: int | None) -> float:
    """As many steps as make chance as tight a limit to the learning rate as the curvature of the loss is."""
    constants = task.constants
    if not task.hides:
        return task.shift * task.records * constants.movement / constants.largest
    count = repeats or _repeats(task, None, {})

    def is_few(log_steps: float) -> bool:
        steps = math.exp(log_steps)
        return _moved(task, steps, epochs * task.records / steps, count) * constants.largest < constants.movement

    return math.exp(search.boundary(is_few, 0.0, math.log(1e6), width=1e-3)[0])


def _repeats(task: Task, batch: int | None, why: dict[str, str]) -> int:
    """Directions of a record: as many as make its own scatter small beside the noise, and as a processor affords."""
    if task.mechanism == "gradient":
        return 1
    if task.hides:
        epochs = task.epochs or (EPOCHS if task.steps is None or batch is None else task.steps * batch / task.records)
        even = task.constants.scatter * task.shift**2 * task.records / (epochs * len(task.layers))
        wanted = min(max(_power_of_two(_TIMES_EVEN * even), _FEW), _MANY)
        cost = _cost_of_a_direction(task.layers)
        reason = (
            f"the noise leads as far astray as the scatter of {even:.2g} directions. {_TIMES_EVEN:g} times as many are worth their "
            f"time, if these are {_FEW} to {_MANY}"
        )
    else:
        wanted, cost = 16, sum(layer.parameters * layer.positions for layer in task.layers)
        reason = f"{wanted} make a record's own scatter small"
    affordable = _power_of_two(_AFFORDABLE / cost)
    count = max(1, min(wanted, affordable))
    why["repeats"] = reason + (f", but a model of this size affords {count}." if count < wanted else ".")
    return count


def _cost_of_a_direction(layers: Sequence[Layer]) -> float:
    """Multiplications: each layer is moved, and what lies behind it is run again."""
    return sum((place + layer.in_weights) * layer.parameters * layer.positions for place, layer in enumerate(layers)) or 1


def _moved(task: Task, steps: float, batch: float, repeats: int) -> float:
    """How far chance moves a weight in a run, per unit of learning rate."""
    noise = task.noise_multiplier or 0.0
    if task.epsilon is not None:
        noise = likely_noise(task.epsilon, task.delta or 1e-5, min(1.0, batch / task.records), max(1, round(steps)))
    if not task.hides:
        return math.sqrt(steps) * noise / batch
    dims = [layer.dim(repeats) for layer in task.layers]
    std = noise if task.epsilon is None else _std_worth(noise, dims, repeats)
    lifted = sum(layer.fan_in * (std / mean_overlap(dim)) ** 2 for layer, dim in zip(task.layers, dims, strict=True)) / task.fan_in
    return math.sqrt(steps * (lifted / batch**2 + task.constants.scatter / (repeats * batch)))


def _std_worth(noise: float, dims: Sequence[int], repeats: int) -> float:
    """`small_signal.hidden_direction_noise`, for layers of equal weight, solved for their noise."""
    if noise == 0:
        return 0.0
    first, second = math.fsum(mean_overlap(dim) ** 2 for dim in dims), math.fsum(1 / (2 * dim * repeats) for dim in dims)
    return noise * math.sqrt((first + math.sqrt(first**2 + 4 * second / noise**2)) / 2)


def _learning_rate(task: Task, steps: int, batch: int, repeats: int, why: dict[str, str]) -> float:
    constants, root, drift = task.constants, math.sqrt(task.fan_in), _moved(task, steps, batch, repeats)
    rate = 1 / (root / constants.largest + root * drift / constants.movement)
    if task.mechanism == "gaussian":
        outputs = sum(layer.parameters / layer.fan_in for layer in task.layers) / len(task.layers)
        rate *= math.sqrt(1 + outputs / repeats)  # an estimate is so much longer than the gradient, and clipping shortens it
    if task.mechanism == "zeroth-order":
        rate *= math.sqrt(task.parameters / repeats)  # the update is shorter by this public factor
    if task.adaptive:  # it divides by the size of a gradient, which is mostly noise; and it has no factor of 1 / (1 - momentum)
        rate *= drift / math.sqrt(steps) / (1 - MOMENTUM)
    chance = "noise and scatter" if task.hides else "noise"
    limit = chance if drift / constants.movement > 1 / constants.largest else "the curvature of the loss"
    why["learning_rate"] = (
        f"limited by {limit}: in {steps:,} steps on batches of {batch:,} {chance} moves a weight by {drift:.2g} per unit of "
        f"learning rate, and an output sees {root:.3g} times that (the root of {task.fan_in:,} inputs)."
    )
    return float(f"{rate:.2g}")


def _power_of_two(value: float) -> int:
    """The power of two nearest to it, at least 1."""
    return int(2 ** max(0, round(math.log2(max(value, 1.0)))))


def _round(value: float) -> int:
    """Two digits are enough."""
    digits = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return int(round(value / digits) * digits)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
