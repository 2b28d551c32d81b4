"""Record one private step on a data set, replay it with one record more, and compare: in the manner of dp-recorder.

All randomness belongs to a record. Its directions, and what a model draws for it (dropout), are computed from the record's own
bytes, so that the others keep theirs when a record comes in. Public draws are the same and the noise is zero. What is left of the
difference between the two sums is what one record can do to a release, and that must be at most what the release says.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dpulr
from dpulr import engine as engine_module
from dpulr.accounting.events import HiddenDirectionRelease
from dpulr.mechanisms.check import bound_of
from dpulr.membership import Membership
from dpulr.model.people import People
from dpulr.randomness import Directions, GaussianNoise, RandomSource
from dpulr.records import Records

TOLERANCE = 1e-6
"""A record's own share keeps 1e-4 below its bound. Beside it the sum may round the shares of the others anew: in data sets of a
dozen records that is some 1e-7 C each, within the margin. So 1e-6 on top is plenty, and anything more would hide a bug."""

Key = bytes
_NOBODY: Key = b""


# --- whose randomness -------------------------------------------------------------------------------------------------------
def keys_of(batch: Any) -> list[Key]:
    """For each row of a nested batch a name that depends on that row's values only."""
    leaves = [leaf.detach().contiguous() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [_digest(b"".join(leaf[i].numpy().tobytes() for leaf in leaves)) for i in range(leaves[0].shape[0])]


def _digest(values: bytes) -> Key:
    return hashlib.blake2b(values, digest_size=16).digest()


def _stream_of(key: Key) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.frombuffer(key, dtype=np.uint32)))


class RecordDirections(Directions):
    """Directions whose numbers belong to records: every record has a stream of its own, from its bytes."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(np.random.default_rng(0), device, dtype)
        self.rows: list[Key] = []
        self.people: list[Key] = []
        self.forget()

    def forget(self) -> None:
        """A new step: all streams begin again."""
        self.drawn: Counter[Key] = Counter()
        self._streams: dict[Key, np.random.Generator] = {}
        self._seen: tuple[Counter[Key], Counter[Key]] = Counter(), Counter()  # records, people
        self._shapes: Sequence[tuple[int, ...]] | None = None

    def announce(self, batch: Any, absent: Sequence[int] = (), people: People | None = None) -> None:
        """The records of the draws to come, and whose they are. Equal ones are told apart by their order, which is all the same for
        their sum.

        What is drawn for rows that hold no record is not counted.
        """
        keys = [_NOBODY if i in absent else key for i, key in enumerate(keys_of(batch))]
        self.rows, self.people = self._numbered(keys, 0), []
        if people is not None:
            theirs = [
                [key for key, owner in zip(keys, people.owners.tolist(), strict=True) if owner == i] for i in range(people.count)
            ]
            self.people = self._numbered([own[0] if len(own) == 1 else _digest(b"".join(own)) for own in theirs], 1)

    def _numbered(self, keys: list[Key], kind: int) -> list[Key]:
        numbered = []
        for key in keys:
            self._seen[kind][key] += 1
            numbered.append(key and key + self._seen[kind][key].to_bytes(2, "big"))
        return numbered

    def expect(self, sizes: Sequence[int]) -> None:
        """Nothing is drawn ahead."""

    def normal(self, *shape: int) -> Tensor:
        if len(shape) == 1 and self._shapes is not None:  # what `spheres` asks for, all shapes in one
            return torch.cat([self._of_records(*own).flatten() for own in self._shapes])
        return self._of_records(*shape)

    def spheres(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        self._shapes = shapes
        try:
            return super().spheres(shapes)
        finally:
            self._shapes = None

    def _of_records(self, repeats: int, records: int, dim: int) -> Tensor:
        rows = self.rows if records == len(self.rows) else self.people
        assert records == len(rows), "directions were drawn for other records than those of the pass"
        numbers = [self._stream(key).standard_normal((repeats, dim), dtype=np.float32) for key in rows]
        for key in rows:
            self.drawn[key] += repeats * dim if key != _NOBODY else 0
        return torch.from_numpy(np.stack(numbers, axis=1)).to(self.device, self.dtype)

    def _stream(self, key: Key) -> np.random.Generator:
        if key not in self._streams:
            self._streams[key] = _stream_of(_digest(key))
        return self._streams[key]


class RecordDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a model draws by itself (dropout, noise), made from the record of each row: the same in every pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[Key] = []
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            name = func.overloadpacket.__name__
            if name in ("dropout", "native_dropout"):
                values, p, training = args
                kept = self._uniform(values) >= p if training else torch.ones_like(values, dtype=torch.bool)
                dropped = values * kept / (1 - p) if training else values
                return dropped if name == "dropout" else (dropped, kept)
            if name == "bernoulli_":
                return args[0].copy_(self._uniform(args[0]) >= 1 - args[1])
            if name == "randn_like":
                return torch.special.ndtri(self._uniform(args[0]).double()).to(args[0].dtype)
            self.unknown.add(str(func))
        return func(*args, **(kwargs or {}))

    def _uniform(self, like: Tensor) -> Tensor:
        """In (0, 1), row by row; the rows of a replay are those of the clean pass, over and over."""
        rows = [self.rows[i % len(self.rows)] for i in range(len(like))]
        size = math.prod(like.shape[1:])
        made = {key: _stream_of(_digest(key + bytes([size % 251]))).random(size) for key in set(rows)}
        return torch.from_numpy(np.stack([made[key] for key in rows])).view(like.shape).clamp(1e-9, 1 - 1e-9).to(like.dtype)


class NoNoise(GaussianNoise):
    """Zeros, and a note of how often they were asked for."""

    def __init__(self, size: int) -> None:
        super().__init__(size, np.random.default_rng(0))
        self.draws = 0

    def prepare(self) -> None:
        """Nothing to draw."""

    def draw(self) -> Tensor:
        self.draws += 1
        return torch.zeros(self.size, dtype=torch.float64)


class Replaying(RandomSource):
    """The source of a replay. It passes as one of the operating system's, so that the engine charges as it would in earnest."""

    reason_for_none = None

    def __init__(self) -> None:
        super().__init__()
        self.batch_rng = np.random.default_rng(0)
        self.draws = RecordDraws()

    def batches(self) -> np.random.Generator:
        return self.batch_rng

    def directions(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Directions:
        self.own_directions = RecordDirections(device, dtype)
        return self.own_directions

    def noise(self, size: int) -> GaussianNoise:
        self.own_noise = NoNoise(size)
        return self.own_noise

    def laplace_noise(self, size: int, scale: int) -> Any:
        return self.noise(size)

    def model_randomness(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return self.draws if self.random_model else contextlib.nullcontext()

    random_model = False

    def follow(self, engine: dpulr.PrivacyEngine) -> None:
        """Listen to which records a pass is about."""
        forward, passes = engine.forward, engine.forward.passes
        clean, pass_clean, pass_losses = forward.clean, passes.clean, passes.losses

        def announced(*args: Any, **kwargs: Any) -> Any:
            return _Announced(clean(*args, **kwargs), self.own_directions)

        def noted_clean(inputs: Any, targets: Any) -> Any:
            self.draws.rows = keys_of(inputs)
            return pass_clean(inputs, targets)

        def noted_losses(of: Any, moves: Any) -> Any:
            self.draws.rows = keys_of(of.inputs)
            return pass_losses(of, moves)

        def noted_model(module: Any, args: Any, kwargs: Any) -> None:
            self.draws.rows = keys_of((args, kwargs))

        forward.clean = announced  # type: ignore[method-assign]
        if self.random_model:
            passes.clean, passes.losses = noted_clean, noted_losses  # type: ignore[method-assign]
            engine.model.register_forward_pre_hook(noted_model, with_kwargs=True)


class _Announced(list[Any]):
    """Clean passes, each announced before it is used."""

    def __init__(self, cleans: Sequence[Any], directions: RecordDirections) -> None:
        super().__init__(cleans)
        self._directions = directions

    def __iter__(self) -> Iterator[Any]:
        for clean in super().__iter__():
            self._directions.announce((clean.inputs, clean.targets), clean.absent, clean.people)
            yield clean


# --- one step, recorded -------------------------------------------------------------------------------------------------------
@dataclass
class Recorded:
    """One step: the sum before noise, how many numbers were drawn for each record, and all that anybody could see of it."""

    total: Tensor | None = None
    drawn: Counter[Key] = field(default_factory=Counter)
    seen: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def prepared_once(known: dict[Any, Any]) -> Iterator[None]:
    """While it lasts, engines whose mechanisms want a model prepared alike share what was found: trying it takes longest."""
    own = vars(engine_module)["prepare"]

    def prepare(model: Any, loss_fn: Any, *args: Any, **settings: Any) -> Any:
        key = (model, loss_fn, *sorted(settings.items()))
        if key not in known:
            known[key] = own(model, loss_fn, *args, **settings)
        forward = copy.copy(known[key])
        forward.passes = copy.copy(forward.passes)
        return forward

    vars(engine_module)["prepare"] = prepare
    try:
        yield
    finally:
        vars(engine_module)["prepare"] = own


class Replay:
    """An engine whose steps can be recorded on any data set of the same schema, at rate 1: every record is in every batch."""

    def __init__(
        self,
        mechanism: Any,
        model: Any,
        example: Any,
        *,
        loss_fn: Any,
        random_model: bool = False,
        **settings: Any,
    ) -> None:
        self.source = Replaying()
        self.source.random_model = random_model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a slower way to run the model: said at set-up, of the model
            self.engine = dpulr.PrivacyEngine(
                model,
                torch.optim.SGD(model.parameters(), lr=0.0),
                example,
                loss_fn,
                mechanism=mechanism,
                expected_batch_size=8.0,
                sample_rate=1.0,
                steps=10**9,
                noise_multiplier=1.0,
                randomness=self.source,
                **settings,
            )
        self.engine.advises = False  # advice is public, and said once per process: before the second step of the first engine
        self.source.follow(self.engine)
        self.engine.on_release(lambda released: self._released.append(released.values))
        self._released: list[Tensor] = []
        self._totals: list[Tensor] = []
        self._public = self.engine.fitted.draw_public(0)
        for name in ("sum_of_bounded_signals", "sum_over_people"):
            setattr(self.engine.fitted, name, self._noted(getattr(self.engine.fitted, name)))
        self.engine.fitted.draw_public = lambda step: self._public
        scales = getattr(self.engine.fitted, "scales", None)
        if scales is not None:
            scales.follow = lambda released: None  # the scales of a step come from earlier releases: the same for both neighbours

    def _noted(self, summed: Any) -> Any:
        def noted(*args: Any) -> Any:
            self._totals.append(summed(*args))
            return self._totals[-1].clone()

        return noted

    def in_parts_of(self, records: int | None) -> None:
        """From now on so many records go through the model at once; None: as many as the mechanism likes. People stay whole."""
        chunks = getattr(self.engine.fitted, "chunks", None)
        if chunks is None:
            return
        vars(chunks).pop("parts", None)
        if records is not None:
            parts = chunks.parts
            chunks.parts = lambda batch, people, most: parts(batch, people, min(most, records))

    def record(self, data: Any, seed: int = 0) -> Recorded:
        """One step on this data. If it has `owners`, people are protected."""
        engine, source = self.engine, self.source
        source.own_directions.forget()
        source.batch_rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        self._released.clear(), self._totals.clear()
        engine._watch.accept()  # engines that share a model try it, each in its turn
        charged, noises, states = engine.ledger.steps, source.own_noise.draws, _global_states()
        raised: tuple[str, str] | None = None
        with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(io.StringIO()) as out:
            warnings.simplefilter("always")
            with contextlib.redirect_stderr(out):
                try:
                    engine._drawing.records = Records(data, torch.device("cpu"))
                    if hasattr(data, "owners"):
                        engine._drawing._membership = Membership(iter(data.owners))
                    for batch in engine.batches(1):
                        engine.step(*batch)
                except Exception as problem:
                    raised = type(problem).__name__, str(problem)
        assert not source.draws.unknown, source.draws.unknown
        seen = {
            "error": raised,
            "warnings": [(warning.category.__name__, str(warning.message)) for warning in said],
            "printed": out.getvalue(),
            "charges": engine.ledger.steps - charged,
            "charged as": engine.ledger.charges[-1].step if engine.ledger.steps else None,
            "releases": [(tuple(values.shape), values.dtype) for values in self._released],
            "draws of noise": source.own_noise.draws - noises,
            "gradients": [None if p.grad is None else (tuple(p.grad.shape), p.grad.dtype) for p in engine.model.parameters()],
            "finite": all(bool(torch.isfinite(values).all()) for values in self._released),
            "global generators": states == _global_states(),
            "modes": [module.training for module in engine.model.modules()],
        }
        return Recorded(self._totals[0].double() if self._totals else None, source.own_directions.drawn, seen)

    def sum_over(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of bounded signals over these records, in this order."""
        self.source.own_directions.forget()
        with torch.inference_mode(), self.engine.forward.checked_mode(), self.source.model_randomness(self.engine.forward.device):
            return self.engine.fitted.sum_of_bounded_signals((inputs, targets), self._public, self.source.own_directions).double()

    def shares(self, difference: Tensor) -> dict[str, float]:
        """The difference of two sums in the metric that the charged release states: each part over its own bound."""
        fitted, step = self.engine.fitted, self.engine.plan.step
        assert step is not None
        if not isinstance(step.release, HiddenDirectionRelease):
            bound = bound_of(step.release, fitted.noise_std)
            assert bound is not None
            return {"all": float(difference.norm()) / bound}
        parts, layout = fitted.parts(difference), fitted.layout
        ratios = [site.noise_ratio for site in step.release.sites] + list(step.release.gaussian)
        groups = {layout.label(group): list(group) for group in layout.groups}
        if layout.votes:
            groups["votes"] = [len(parts) - 1]
        return {
            label: float(torch.cat([parts[i] for i in group]).norm()) / (fitted.noise_std / ratio)
            for (label, group), ratio in zip(groups.items(), ratios, strict=True)
        }


def _global_states() -> tuple[bytes, bytes]:
    """Nobody's but the user's: no step may move them."""
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr]


# --- two steps, compared --------------------------------------------------------------------------------------------------------
class Leak(AssertionError):
    """One record did more than its share."""


def compare(replay: Replay, data: Any, neighbour: Any, seed: int = 0) -> dict[str, float]:
    """A step on `data` and one on `neighbour`, which has one record more. Returns the shares; raises where they are too large."""
    first, second = replay.record(data, seed), replay.record(neighbour, seed)
    if first.seen != second.seen:
        differ = {name: (value, second.seen[name]) for name, value in first.seen.items() if value != second.seen[name]}
        raise Leak(f"one record more, and this can be seen: {differ}")
    if first.seen["error"] or first.seen["printed"] or first.total is None or second.total is None:
        raise Leak(f"a step that does not end quietly: {first.seen}")
    if not first.seen["global generators"]:
        raise Leak("a step moved the global generators")
    others = {key: drawn for key, drawn in first.drawn.items() if second.drawn[key] != drawn}
    most = replay.engine.plan.per_person * max(first.drawn.values(), default=0)
    if others or (first.drawn and sum((second.drawn - first.drawn).values()) > most):
        raise Leak("one record changes how many numbers are drawn for the others")
    if first.total.shape != second.total.shape or not bool(torch.isfinite(second.total).all()):
        raise Leak("one record changes the shape of the sum, or makes it infinite")
    shares = replay.shares(second.total - first.total)
    if max(shares.values()) > 1 + TOLERANCE:
        raise Leak(f"one record moves the sum by {max(shares.values()):.7g} of its bound: {shares}")
    return shares
