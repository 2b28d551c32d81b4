"""A rule from outside is tried on synthetic inputs: its gains and norms bound what a record adds, so they must not be too small.

It is compared with the layer itself, run by torch. No derivative of torch is used in training; here it only confirms the rule.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpulr.errors import ModelRefused
from dpulr.model.layers.base import Call, LayerRule, numel
from dpulr.norms import flat_norm

_SEED = 20_240_302  # public: only synthetic inputs depend on it
_SCALES = (1.0, 1e-3, -1e3)
_POWER_STEPS = 8
_MARGIN = 1.001
_CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5}


def check_rule(rule: LayerRule, call: Call, label: str, *, output_space: bool) -> None:
    """Refuse a rule whose bounds are too small, or which does not do what its layer does. `call` has synthetic inputs."""
    generator = torch.Generator().manual_seed(_SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.func on what it will change
        for scale in _SCALES:
            check = _check_output_space if output_space else _check_weight_space
            check(rule, _scaled(rule, call, scale), label, generator)
    if output_space and rule.finite_gain_suffices:
        ones = torch.ones_like(call.output)
        for bad in (math.nan, math.inf):
            found = [("norms", "a signal", rule.norms(call, bad * ones))]
            if _any_floats(call):
                spoilt = _spoilt(call, bad)
                found += [("gains", "an input", rule.gains(spoilt)), ("norms", "an input", rule.norms(spoilt, ones))]
            for kind, what, values in found:
                if bool(torch.isfinite(values).any()):
                    raise _refused(label, f"its {kind} are finite for {what} of {bad}, although it says finite_gain_suffices")


def _check_output_space(rule: LayerRule, call: Call, label: str, generator: torch.Generator) -> None:
    gains = rule.gains(call)
    if gains.shape != (call.records,):
        raise _refused(label, f"its gains have shape {tuple(gains.shape)} for {call.records} records")
    for signal in _signals(rule, call, generator):
        for i in range(call.records):
            one, own = call.rows(i, i + 1), signal[i : i + 1]
            gradient = _gradient(rule, one, own)
            norm, length = float(flat_norm(gradient.double().unsqueeze(0))), float(flat_norm(own.double()))
            _refuse_small(label, "gain", norm, float(gains[i]) * length)
            if own.shape[1:] == call.output.shape[1:]:
                _refuse_small(label, "norm", norm, float(rule.norms(one, own)))
                _refuse_other_gradient(rule, one, own, gradient, label)
                _refuse_small_joint_norm(rule, [one, call.rows(0, 1)], [own, signal[:1]], label)


def _refuse_small(label: str, kind: str, norm: float, bound: float) -> None:
    if not norm <= _MARGIN * bound + 1e-30:
        factor = norm / bound if bound > 0 else math.inf
        raise _refused(
            label, f"a record's gradient is {factor:.4g} times as long as its {kind} allows, so that it would exceed its bound"
        )


def _refuse_small_joint_norm(rule: LayerRule, calls: list[Call], signals: list[Tensor], label: str) -> None:
    """Of two calls, or of two records of a person."""
    joint = rule.joint_norms(calls, signals)
    if joint is not None:
        total = torch.stack([_gradient(rule, *one) for one in zip(calls, signals, strict=True)]).double().sum(0)
        _refuse_small(label, "joint norm", float(flat_norm(total.unsqueeze(0))), float(joint[0]))


def _refuse_other_gradient(rule: LayerRule, call: Call, signal: Tensor, gradient: Tensor, label: str) -> None:
    expected = _vjp(rule, call, signal)
    if expected is None:
        return
    largest = max(float(expected.abs().max()), 1e-30)
    if not torch.allclose(gradient / largest, expected / largest, **_CLOSE):
        raise _refused(label, "its add_gradient is not the gradient that torch finds")


def _check_weight_space(rule: LayerRule, call: Call, label: str, generator: torch.Generator) -> None:
    """Each record must be moved by its own weights, and only by them."""
    shape = (2, call.records, rule.weight_dim)
    flat = 0.1 * torch.randn(shape, generator=generator, dtype=call.output.dtype).to(call.output.device)
    found, expected = rule.with_weights(call, flat), LayerRule.with_weights(rule, call, flat)
    largest = max(float(expected.abs().max()), 1e-30)
    if found.shape != expected.shape or not torch.allclose(found / largest, expected / largest, **_CLOSE):
        raise _refused(label, "its with_weights does not give the output of the layer with a record's own weights")


def _refused(label: str, what: str) -> ModelRefused:
    return ModelRefused(f"the rule that was registered for {label} is wrong: {what}. Tried on synthetic inputs.")


# --- what it is tried on ------------------------------------------------------------------------------------------------
def _signals(rule: LayerRule, call: Call, generator: torch.Generator) -> Iterator[Tensor]:
    """Of the output's shape: random, constant, one number only, and the one that is lengthened most; and of fewer dimensions."""
    shape, like = call.output.shape, call.output
    random = torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)
    yield random
    yield torch.ones_like(like)
    single = torch.zeros_like(like).flatten(1)
    single[:, 0] = 1
    yield single.view(shape)
    for _ in range(_POWER_STEPS):
        longest = _pulled_and_pushed(rule, call, random)
        if longest is None:
            break
        random = longest
    yield random
    if rule.shares_positions and shape[-1] > 1:
        yield random[..., : max(1, shape[-1] // 2)].contiguous()


def _pulled_and_pushed(rule: LayerRule, call: Call, signal: Tensor) -> Tensor | None:
    """One step of the power iteration: J J^T times the signal of each record, brought to length 1."""
    found = []
    for i in range(call.records):
        one = call.rows(i, i + 1)
        weights = _vjp(rule, one, signal[i : i + 1])
        if weights is None:
            return None
        step = weights / max(float(weights.norm()), 1e-30)
        with torch.inference_mode(False), torch.no_grad():
            own = {name: p.detach() for name, p in rule.parameters.items()}
            found.append(torch.func.jvp(_as_function(rule, one), (own,), (rule.split(step.clone()),))[1])
    moved = torch.cat(found)
    return moved / flat_norm(moved).clamp_min(1e-30).view(-1, *[1] * (moved.dim() - 1))


def _as_function(rule: LayerRule, call: Call) -> Any:
    args, kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs))
    return lambda weights: torch.func.functional_call(rule.module, weights, args, kwargs)


def _vjp(rule: LayerRule, call: Call, signal: Tensor) -> Tensor | None:
    """The gradient that torch finds, flat; None where it finds none: a layer need not have one that autograd knows."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            own = {name: p.detach().clone().requires_grad_() for name, p in rule.parameters.items()}
            output = _as_function(rule, call)(own)
            found = torch.autograd.grad(output, list(own.values()), signal.clone())
    except Exception:
        return None
    return torch.cat([part.flatten() for part in found])


def _gradient(rule: LayerRule, call: Call, signal: Tensor) -> Tensor:
    """What the rule adds for these records, flat. A signal of fewer dimensions needs fewer rows of each parameter."""
    rows = None if signal.shape == call.output.shape else signal.shape[-1]
    into = {
        name: torch.zeros(p.shape if rows is None else (rows, *p.shape[1:]), dtype=p.dtype, device=p.device)
        for name, p in rule.parameters.items()
    }
    rule.add_gradient(call, signal, into)
    return torch.cat([part.flatten() for part in into.values()])


def _scaled(rule: LayerRule, call: Call, factor: float) -> Call:
    """The same call with other inputs, and the layer's own output for them."""
    if factor == 1:
        return call
    args, kwargs = _changed(call, lambda leaf: leaf * factor)
    return Call(args, kwargs, rule.module(*args, **kwargs), call.per_record)


def _spoilt(call: Call, value: float) -> Call:
    """The same call with one number of each record's floating-point inputs replaced."""

    def spoil(leaf: Tensor) -> Tensor:
        leaf = leaf.clone().reshape(len(leaf), numel(leaf.shape[1:]))
        leaf[:, -1] = value
        return leaf

    args, kwargs = _changed(call, lambda leaf: spoil(leaf).view_as(leaf))
    return Call(args, kwargs, call.output, call.per_record)


def _any_floats(call: Call) -> bool:
    leaves = zip(pytree.tree_leaves((call.args, call.kwargs)), call.per_record, strict=True)
    return any(marked and leaf.is_floating_point() for leaf, marked in leaves)


def _changed(call: Call, change: Any) -> tuple[Any, Any]:
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    changed = [
        change(leaf) if marked and leaf.is_floating_point() else leaf for leaf, marked in zip(leaves, call.per_record, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(changed, spec)
    return args, kwargs
