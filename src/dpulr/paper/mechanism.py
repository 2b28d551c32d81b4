"""`paper`: DP-ULR as its paper prints it (Algorithm 1). It has no privacy guarantee: see docs/errata.md.

In each step and layer: one clean pass gives the Jacobians and losses, from which the privacy controller takes the standard
deviation sigma of the noise (eq:sigma), or the extra noise that is missing; K normal perturbations of the layer's output give a
record's gradient by the one-sided likelihood ratio; it is clipped to C, layer by layer; the update is the sum over N_B.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from dpulr.accounting.events import PaperRelease
from dpulr.mechanisms.base import Bound, Guarantee, Mechanism, check_spaces, weighted
from dpulr.model.layers import Call
from dpulr.model.layers.affine import AffineRule
from dpulr.model.layers.base import flat_norm
from dpulr.model.replay import Clean, Forward, LoneForward
from dpulr.model.sites import Site, Space
from dpulr.paper.covariance import Covariance, RowBlocks, blocks_of
from dpulr.paper.schedules import Schedule, Setting
from dpulr.randomness import Directions

Remedy = Literal["auto", "extra-noise", "parameters", "none"]


@dataclass(frozen=True)
class Paper(Mechanism):
    """Settings. Those of type Setting may differ by layer and step: see `paper_schedule`.

    target_std           sigma0; 0 is plain, non-private ULR. None: the engine's noise_multiplier
    repeats              K, perturbations a record and layer
    max_grad_norm        C, the clip bound of each layer; math.inf does not clip, where target_std is 0
    rejection_threshold  N_B: smaller batches are drawn again, and the update is divided by it. None: what the engine was given; if
                         that is none either, nothing is rejected, and the update is divided by the expected batch size.
                         Layers share the batch, so the largest of their thresholds rejects; each divides by its own
    sigma                the largest standard deviation that is injected at a layer's output; over sqrt(fan-in) where parameters are
                         perturbed. The paper does not state its value
    remedy               where the batch's covariance lacks rank: "extra-noise" along its eigenvectors, with sigma as given;
                         "parameters" perturbs the parameters instead (the paper's virtual linear layer); "none" raises an error;
                         "auto" follows eq:sigma in the layers that have full rank and adds extra noise in the others
    simultaneous         noise at all layers in one pass, as ULR does, instead of one layer at a time
    """

    target_std: Setting | None = None
    repeats: Setting = 16
    max_grad_norm: Setting = 1.0
    rejection_threshold: Setting | None = None
    sigma: Setting = 0.5
    remedy: Remedy = "auto"
    simultaneous: bool = False
    space: Space = "output"
    name: ClassVar[str] = "paper"
    guarantee: ClassVar[Guarantee] = "none"

    def __post_init__(self) -> None:
        if self.remedy not in ("auto", "extra-noise", "parameters", "none"):
            raise ValueError(f"remedy is {self.remedy!r}; it must be 'auto', 'extra-noise', 'parameters' or 'none'.")
        if not isinstance(self.simultaneous, bool):
            raise ValueError(f"simultaneous is {self.simultaneous!r}; it must be true or false.")
        if self.remedy == "parameters":
            object.__setattr__(self, "space", "weight")
        check_spaces(self.space, None)
        for name in ("target_std", "repeats", "max_grad_norm", "rejection_threshold", "sigma"):
            setting = getattr(self, name)
            if isinstance(setting, int | float | str):
                _CHECKS[name](setting)

    @property
    def owns_noise(self) -> bool:
        return self.target_std is not None

    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> BoundPaper:
        return BoundPaper(self, forward, memory_limit=memory_limit, seed=seed)


class Controls(NamedTuple):
    """What holds for one layer in one step."""

    target_std: float
    repeats: int
    clip: float
    sigma: float


class BoundPaper(Bound):
    def __init__(self, settings: Paper, forward: Forward, *, memory_limit: int | None, seed: int) -> None:
        super().__init__(forward, memory_limit=memory_limit, seed=seed, subspace=None)
        self.settings = settings
        self.blocks = [blocks_of(site) for site in forward.sites]
        self._schedules = {
            name: Schedule(name, setting, len(self.blocks), check)
            for name, check in _CHECKS.items()
            if (setting := getattr(settings, name)) is not None
        }
        self.varies = any(schedule.varies for schedule in self._schedules.values())
        self.controls: list[Controls] = []
        """What the controller decided in this step, layer by layer. It depends on the batch: nothing covers it."""
        self._extra: list[Covariance | None] = []
        self._warned: set[str] = set()
        if settings.simultaneous:
            self._check_simultaneous()

    # --- settings of a step -------------------------------------------------------------------------------------------
    def _now(self, name: str) -> tuple[float, ...]:
        return self._schedules[name].at(self.step)

    @property
    def own_noise(self) -> float | None:
        return min(self.target_stds()) if self.settings.owns_noise else None

    @property
    def without_noise(self) -> str:
        return "no noise was added to some layers" if any(self.target_stds()) else super().without_noise

    @property
    def rejection_threshold(self) -> int | None:
        return int(max(self._now("rejection_threshold"))) if "rejection_threshold" in self._schedules else None

    def denominator(self, expected_batch_size: float, rejection_threshold: int) -> float:
        """N_B; without one, the expected batch size."""
        return rejection_threshold or expected_batch_size

    def target_stds(self) -> tuple[float, ...]:
        return self._now("target_std") if self.settings.owns_noise else (self.noise_multiplier,) * len(self.blocks)

    def event_at(self, noise_multiplier: float) -> PaperRelease:
        """The paper's theorem has one sigma0: the smallest of the layers'."""
        return PaperRelease(min(self.target_stds()) if self.settings.owns_noise else noise_multiplier, len(self.blocks))

    @property
    def noise_std(self) -> float:
        """Of the isotropic noise before what the gradients carry themselves is taken off, in the layer that has most."""
        return max(c.target_std * c.clip if c.target_std else 0.0 for c in self.controls)

    # --- one step -----------------------------------------------------------------------------------------------------
    def total(self, inputs: Any, targets: Any, directions: Directions) -> Tensor:
        """Sum of the clipped gradients. To choose sigma, the controller needs the clean losses and Jacobians of the whole batch."""
        chunks = list(self.record_chunks(inputs, targets))
        stds = self.target_stds()
        precise = self.dtype if self.settings.remedy == "extra-noise" else torch.float64  # eq:sigma needs the smallest eigenvalue
        covariances = [Covariance(blocks, precise, self.device) for blocks in self.blocks]
        total = torch.zeros(self.size, device=self.device, dtype=self.dtype)
        parts = self._parts(total)
        at_once = self.settings.remedy == "extra-noise" and len(chunks) > 1  # sigma is given: one clean pass does for both
        if at_once:
            self._control(stds, covariances)
        clean = None
        for chunk in chunks:
            clean = self.forward.surviving(*chunk)
            if clean is not None:
                for blocks, call, covariance, std in zip(self.blocks, clean.calls, covariances, stds, strict=True):
                    if std > 0:
                        blocks.add(call, clean.losses, covariance)
                if at_once:
                    self.add(clean, directions, parts)
        if not at_once:
            self._control(stds, covariances)
        for chunk in () if at_once else chunks:
            if len(chunks) > 1:
                clean = self.forward.surviving(*chunk)
            if clean is not None:
                self.add(clean, directions, parts)
        return total

    def add(self, clean: Clean, directions: Directions, parts: list[Tensor]) -> None:
        if self.settings.simultaneous:
            self._add_together(clean, directions, parts)
            return
        for i, (site, call, control) in enumerate(zip(self.forward.sites, clean.calls, self.controls, strict=True)):
            signal = self.estimate(clean, i, directions, control)
            gradients = self._record_gradients(site, call, signal)
            if gradients is not None:
                scale = (control.clip / flat_norm(gradients)).clamp(max=1)
                site.add_weight_signal(gradients, scale, parts[i])
            else:
                scale = (control.clip / site.norms(call, signal)).clamp(max=1)
                self.coordinates[i].add(call, signal, scale, parts[i])

    def estimate(self, clean: Clean, index: int, directions: Directions, control: Controls) -> Tensor:
        """(records, dim): the mean over the repeats of z L(v + z) / sigma^2, z normal with standard deviation sigma."""
        site, call, sigma = self.forward.sites[index], clean.calls[index], control.sigma
        signal = torch.zeros(clean.records, site.dim, device=self.device, dtype=self.dtype)
        for repeats in self.repeat_chunks(self.row_bytes(site), clean.records, control.repeats):
            z = directions.normal(repeats, clean.records, site.dim)
            losses = self.forward.losses(clean, index, _perturbed(site, call, z, sigma))
            signal += weighted(torch.where(torch.isfinite(losses), losses, 0), z)
        return signal.div_(control.repeats * sigma)

    @staticmethod
    def _record_gradients(site: Site, call: Call, signal: Tensor) -> Tensor | None:
        """(records, parameters), where it pays to make them: then they serve both the norms and the sum."""
        if site.space == "output" and isinstance(site.rule, AffineRule):
            return site.rule.record_gradients(call, signal.view(-1, *site.output_shape))
        return None

    def release(self, total: Tensor, noise: Tensor, denominator: float) -> Tensor:
        """The sum, with extra noise along the eigenvectors where the remedy asks for it, over N_B."""
        release = total.clone()
        sizes = self._now("rejection_threshold") if "rejection_threshold" in self._schedules else (denominator,) * len(self.blocks)
        everything = zip(self._parts(release), self._parts(noise), self.blocks, self.controls, self._extra, sizes, strict=True)
        for part, normal, blocks, control, covariance, size in everything:
            if covariance is not None:
                packed = blocks.pack(blocks.site.rule.split(normal.to(covariance.dtype)))
                credit = 1 / (control.repeats * control.sigma**2)
                extra = blocks.unpack(covariance.extra_noise(packed, control.target_std * control.clip, credit))
                for name, view in blocks.site.rule.split(part).items():
                    view += extra[name]
            part /= size
        return release

    # --- the privacy controller ---------------------------------------------------------------------------------------
    def _control(self, stds: tuple[float, ...], covariances: list[Covariance]) -> None:
        """Choose sigma for each layer (eq:sigma), or the extra noise."""
        self.controls, self._extra = [], []
        self._check_shared(self._now("repeats"))
        settings = zip(stds, self._now("repeats"), self._now("max_grad_norm"), self._now("sigma"), strict=True)
        for i, (std, repeats, clip, most) in enumerate(settings):
            most *= self.forward.sites[i].scale
            sigma, extra = most, None
            if std > 0:
                if math.isinf(clip):
                    raise ValueError("max_grad_norm is infinite, but target_std is not 0: noise is scaled by the clip bound.")
                if self.settings.remedy == "extra-noise":
                    extra = covariances[i]
                else:
                    smallest = covariances[i].smallest()
                    if smallest > 0:
                        sigma = min(most, math.sqrt(smallest / repeats) / (clip * std))
                    else:
                        self._report_deficiency(i, covariances[i])
                        extra = covariances[i]
            self.controls.append(Controls(std, int(repeats), clip, sigma))
            self._extra.append(extra)

    def _report_deficiency(self, index: int, covariance: Covariance) -> None:
        """Say it once a layer; without a remedy, stop: no sigma meets eq:sigma."""
        blocks, label = self.blocks[index], self.forward.sites[index].layer.label
        if label in self._warned:
            return
        text = (
            f"the batch's gradients have no noise in some directions of {label}: the covariance has rank "
            f"{covariance.rank() * blocks.copies} of {blocks.count * blocks.copies * blocks.width}"
        )
        if self.settings.remedy == "none":
            raise ValueError(f"{text}. No sigma meets the paper's condition. Use remedy='extra-noise' or 'parameters'.")
        self._warned.add(label)
        warnings.warn(f"{text}, so extra noise is added along its eigenvectors", stacklevel=2)

    # --- noise at all layers at once ----------------------------------------------------------------------------------
    def _add_together(self, clean: Clean, directions: Directions, parts: list[Tensor]) -> None:
        """The Jacobians are those of the noisy inputs, so a record's gradient is a sum over repeats, like one over positions."""
        sites, controls = self.forward.sites, self.controls
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in sites]
        largest = max(self.row_bytes(site) for site in sites)
        for repeats in self.repeat_chunks(largest, clean.records, controls[0].repeats):
            z = [directions.normal(repeats, clean.records, site.dim) for site in sites]
            deltas = [control.sigma * draw for control, draw in zip(controls, z, strict=True)]
            losses, inputs = self.forward.moved_together(clean, deltas)
            losses = torch.where(torch.isfinite(losses), losses, 0)
            for i, (site, blocks, control) in enumerate(zip(sites, self.blocks, controls, strict=True)):
                assert isinstance(blocks, RowBlocks)
                good = torch.isfinite(inputs[i]).flatten(1).all(1)  # other rows add nothing
                x = inputs[i].masked_fill(~good.view(-1, *[1] * (inputs[i].dim() - 1)), 0)
                u = (losses * good.view_as(losses)).unsqueeze(2) * z[i] / (control.repeats * control.sigma)
                rows, signals = blocks.rows(x), blocks.signals(u.view(-1, *site.output_shape))
                found[i].append((_by_record(rows, clean.records), _by_record(signals, clean.records)))
        for i, (blocks, control) in enumerate(zip(self.blocks, controls, strict=True)):
            rows, signals = (torch.cat(tensors, dim=2) for tensors in zip(*found[i], strict=True))
            scale = control.clip / _norms(rows, signals)
            signals = signals * torch.where(torch.isfinite(scale), scale.clamp(max=1), 1.0).view(-1, 1, 1, 1)
            gradient = blocks.unpack(torch.einsum("ngpc,ngpw->gcw", signals, rows))
            for name, view in blocks.site.rule.split(parts[i]).items():
                view += gradient[name]

    def _check_simultaneous(self) -> None:
        for site, blocks in zip(self.forward.sites, self.blocks, strict=True):
            if not isinstance(blocks, RowBlocks):
                raise ValueError(f"simultaneous noise needs layers with an output space of rows; {site.layer.label} has none.")
        if isinstance(self.forward, LoneForward):
            raise ValueError("simultaneous noise needs a model that runs on whole batches.")
        for step in (0, *getattr(self.settings.repeats, "keys", tuple)()):
            self._check_shared(self._schedules["repeats"].at(int(step)))

    def _check_shared(self, repeats: tuple[float, ...]) -> None:
        if self.settings.simultaneous and len(set(repeats)) > 1:
            raise ValueError("with simultaneous noise all layers share the passes: repeats must be the same for all.")


def _perturbed(site: Site, call: Call, z: Tensor, sigma: float) -> Tensor:
    """`site.perturbed` by sigma * z, in one go where that is a sum."""
    if site.space == "output":
        return torch.add(call.output, z.view(*z.shape[:2], *site.output_shape), alpha=sigma)
    return site.perturbed(call, sigma * z)


def _by_record(rows: Tensor, records: int) -> Tensor:
    """(repeats * records, blocks, positions, width) as (records, blocks, repeats * positions, width)."""
    split = rows.view(-1, records, *rows.shape[1:])
    return split.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _norms(rows: Tensor, signals: Tensor) -> Tensor:
    """Norm of each record's sum over positions of signal (outer) row, by Gram matrices or directly, whichever is smaller."""
    positions, width, copies, dtype = rows.shape[2], rows.shape[3], signals.shape[3], signals.dtype
    if positions * positions > width * copies:
        return flat_norm(signals.transpose(2, 3) @ rows)
    rows, signals = rows.double(), signals.double()
    square = ((rows @ rows.transpose(2, 3)) * (signals @ signals.transpose(2, 3))).sum((1, 2, 3))
    norms: Tensor = square.clamp_min(0).sqrt().to(dtype)
    return norms


def _number(name: str, what: str, least: float, *, whole: bool = False, infinite: bool = False) -> Any:
    def check(value: object) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and value >= least
        if not good or (math.isinf(value) and not infinite) or (whole and value != int(value)):  # type: ignore[arg-type, call-overload]
            raise ValueError(f"{name} is {value!r}; it must be {what}.")
        return value  # type: ignore[return-value]

    return check


_TINY = math.ulp(0.0)
_CHECKS = {
    "target_std": _number("target_std", "a number of at least 0", 0),
    "repeats": _number("repeats", "a whole number of at least 1", 1, whole=True),
    "max_grad_norm": _number("max_grad_norm", "a positive number", _TINY, infinite=True),
    "rejection_threshold": _number("rejection_threshold", "a whole number of at least 1", 1, whole=True),
    "sigma": _number("sigma", "a positive number", _TINY),
}
