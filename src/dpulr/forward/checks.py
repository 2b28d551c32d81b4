"""Row independence: a record's loss may depend on that record alone. Checked on synthetic inputs before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.forward.synthetic import call_model, join, like, rows

LossFunction = Callable[[Any, Any], Tensor]
_SEED = 20_240_229  # public: only made-up inputs depend on it


def check_rows(model: nn.Module, loss_fn: LossFunction, example: tuple[Any, Any], device: torch.device) -> None:
    """Refuse, by name, a loss that is not one value a record, batch statistics, state, and NaN at the start."""
    generator = torch.Generator().manual_seed(_SEED)
    kept = like(example, 2, generator, device)
    others, elsewhere = like(example, 2, generator, device), _stretched(like(example, 2, generator, device))
    with _buffers_restored(model) as buffers:
        first = _Run(model, loss_fn, join(kept, others))
        if first.losses.shape != (4,):
            raise ValueError(
                f"the loss function must return one value per record: for 4 records it returned shape "
                f"{tuple(first.losses.shape)}. Pass reduction='none', and average what a record has of its own."
            )
        second = _Run(model, loss_fn, join(kept, elsewhere))
        again = _Run(model, loss_fn, join(kept, others))
        _refuse_difference(model, first, again, "keeps state from one call to the next")
        _refuse_difference(model, first, second, "mixes records: a record's value changes with the other records of its batch")
        unseeded = _Run(model, loss_fn, join(kept, others), seed=1)
        if _same(first.losses, unseeded.losses):  # no dropout or the like: a smaller batch must give the same
            _refuse_difference(
                model,
                first,
                _Run(model, loss_fn, kept),
                "mixes records: a record's value changes with the size of its batch",
            )
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                raise ValueError(
                    f"buffer '{name}' of {_owner(model, name)} changes in the forward pass: running statistics of private data are "
                    "a release that nothing accounts for. Use GroupNorm or LayerNorm, or put the module in eval mode."
                )
    if not bool(torch.isfinite(first.losses).all()):
        raise ValueError(
            f"the loss is {first.losses[~torch.isfinite(first.losses)][0].item()} before the first step, on made-up inputs between "
            "0 and 1. Check the initial weights and the loss function."
        )


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Copies of all buffers; afterwards the model holds the very tensors it held before, with their values."""
    owners = [(module, key) for module in model.modules() for key in module._buffers]
    tensors = [module._buffers[key] for module, key in owners]
    copies = [None if tensor is None else tensor.clone() for tensor in tensors]
    try:
        yield {name: buffer.clone() for name, buffer in model.named_buffers()}
    finally:
        with torch.no_grad():
            for (module, key), tensor, copy in zip(owners, tensors, copies, strict=True):
                if tensor is not None and copy is not None:
                    module._buffers[key] = tensor.copy_(copy)


class _Run:
    """One pass over a batch, with the inputs and outputs of all innermost modules in the order of their calls."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, Any], seed: int = 0) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        handles = [
            module.register_forward_hook(self._note(name))
            for name, module in model.named_modules()
            if not any(True for _ in module.children())
        ]
        inputs, targets = batch
        try:
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(seed)
                self.output = call_model(model, inputs)
                self.losses = loss_fn(self.output, targets)
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(self.losses, Tensor):
            raise ValueError(f"the loss function must return a tensor with one value per record, not {type(self.losses).__name__}.")

    def _note(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            self.calls.append((name, pytree.tree_map(_cloned, inputs), pytree.tree_map(_cloned, output)))

        return note


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _refuse_difference(model: nn.Module, first: _Run, second: _Run, what: str) -> None:
    """If records 0 and 1 differ between the two runs, say where the difference begins."""
    if _same(rows(first.output, 0, 2), rows(second.output, 0, 2)):
        if _same(first.losses[:2], second.losses[:2]):
            return
        raise ValueError(f"the loss function {what}.")
    for (name, inputs, output), (_, other_inputs, other_output) in zip(first.calls, second.calls, strict=False):
        if not _same_rows(inputs, other_inputs):
            raise ValueError(f"an operation before '{name}' {what}. {_ADVICE}")
        if not _same_rows(output, other_output):
            kind = type(model.get_submodule(name)).__name__
            raise ValueError(f"'{name}' ({kind}) {what}. {_ADVICE}")
    raise ValueError(f"an operation in the forward of {type(model).__name__} {what}. {_ADVICE}")


_ADVICE = "Nothing bounds a record's influence then. Use GroupNorm or LayerNorm instead of batch statistics."


def _same_rows(first: Any, second: Any) -> bool:
    """Compare the leading half of tensors that carry records; others count only if their shapes differ from record to record."""
    return all(
        _same(a[:2], b[:2])
        for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=False)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() > 0 and a.shape[0] in (2, 4)
    )


def _same(first: Any, second: Any) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
        if isinstance(a, Tensor)
    )


def _stretched(batch: Any) -> Any:
    """Floats ten times as large, so that a mean over records moves visibly."""
    inputs, targets = batch
    return (
        pytree.tree_map(lambda leaf: leaf * 10 if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, inputs),
        targets,
    )


def _owner(model: nn.Module, buffer: str) -> str:
    path = buffer.rpartition(".")[0]
    return f"'{path}' ({type(model.get_submodule(path)).__name__})" if path else f"the model ({type(model).__name__})"
