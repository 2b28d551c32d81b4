"""What a layer must be so that it can be moved: it carries a row per record, is used nowhere else, and mixes no records."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpulr.errors import ModelRefused
from dpulr.model.layers import Call
from dpulr.model.passes import Move, Passes
from dpulr.model.sites import Site
from dpulr.model.trained_layers import Layer, sharing
from dpulr.model.trials import CLOSE, PROBE_SIZES, SEED, Probe, other_weights
from dpulr.randomness import public_seed


def carries_records(layer: Layer, small: Call, large: Call) -> tuple[bool, ...]:
    """For each argument of the call: does its first axis count the records? Any other growth with the batch is refused."""
    marks = []
    leaves = zip(
        [*pytree.tree_leaves((small.args, small.kwargs)), small.output],
        [*pytree.tree_leaves((large.args, large.kwargs)), large.output],
        strict=True,
    )
    for a, b in leaves:
        if not isinstance(a, Tensor) or a.shape == b.shape:
            marks.append(False)
            continue
        if a.shape[1:] != b.shape[1:] or (a.shape[0], b.shape[0]) != PROBE_SIZES:
            raise ModelRefused(
                f"{layer.label} sees tensors of shape {tuple(a.shape)} for {PROBE_SIZES[0]} records. The first axis must "
                "count the records, one row each (batch_first=True; flatten positions into later axes, not into the first)."
            )
        marks.append(True)
    if not isinstance(small.output, Tensor) or not marks.pop():
        raise ModelRefused(f"{layer.label} must return one tensor whose first axis counts the records.")
    return tuple(marks)


def check_weights(site: Site, call: Call) -> None:
    """The layer must run with weights of each record's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.func on what it batches slowly
        out = site.moved(call, torch.zeros(1, call.records, site.full_dim, dtype=call.output.dtype, device=call.output.device))
    if not bool(torch.isfinite(out).all()) and bool(torch.isfinite(call.output).all()):
        raise ModelRefused(f"{site.label} does not run with weights of a record's own (torch.func.functional_call).")


def refuse_half(layer: Layer, call: Call) -> None:
    for leaf in pytree.tree_leaves((call.args, call.kwargs, call.output)):
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16):
            raise ModelRefused(
                f"{layer.label} sees or returns values of type {leaf.dtype}: their rounding is coarser than the bound on a record. "
                "Run its forward pass in float32, without autocast."
            )


def refuse_use_elsewhere(passes: Passes, probe: Probe) -> None:
    """With a layer's output held fixed, its weights must not matter: what they do elsewhere would never be trained."""
    alone = [members[0] for members in sharing(passes.layers) if len(members) == 1]
    with torch.inference_mode(), torch.random.fork_rng():
        clean = passes.clean(*probe)
        for i, layer in enumerate(passes.layers):
            if i not in alone:  # what it shares is used elsewhere on purpose
                continue
            fixed = clean.calls[i].output.unsqueeze(0)
            public_seed(SEED)
            base = passes.losses(clean, [Move(i, fixed.clone())])  # the model may overwrite it
            with other_weights(layer.parameters.values(), keep=1.0):
                public_seed(SEED)
                moved = passes.losses(clean, [Move(i, fixed.clone())])
            if not torch.allclose(base, moved, **CLOSE):
                raise ModelRefused(
                    f"weights of {layer.label} are used outside of it, too (tied by hand, or a penalty in the loss). That use "
                    "would not be trained. Untie them, give penalties to the optimizer (weight_decay), or freeze them "
                    "(requires_grad_(False))."
                )


def check_alignment(passes: Passes, probe: Probe) -> None:
    """Noise on a record must reach that record's loss only."""
    with torch.inference_mode(), torch.random.fork_rng():
        for i, layer in enumerate(passes.layers):
            public_seed(SEED)
            clean = passes.clean(*probe)
            output = clean.calls[i].output
            moved = output.clone()
            moved[0] += torch.randn_like(moved[0])
            found = []
            for own in (output, moved):
                public_seed(SEED)
                found.append(passes.losses(clean, [Move(i, own.unsqueeze(0))])[0, 0, 1:])
            if not torch.allclose(found[0], found[1], **CLOSE):
                raise ModelRefused(f"downstream of {layer.label} records are mixed: noise on record 0 reaches the loss of another.")
