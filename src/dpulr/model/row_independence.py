"""Row independence: a record's loss may depend on that record alone. Checked on synthetic inputs before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpulr.errors import ModelRefused
from dpulr.model.batches import call_model, call_on_copy, choose, count, described, join, row, synthetic
from dpulr.model.losses import LossFunction

_SEED = 20_240_229  # public: only synthetic inputs depend on it
_ALL = 5
_KEPT = (1, 3)  # records that stay while the others change: some lie before them, between them and after them


def reads_values(model: nn.Module, loss_fn: LossFunction, example: tuple[Any, Any], device: torch.device) -> bool:
    """Whether the forward pass turns a tensor into a Python number, as `if x.sum() > 0` does, or into a shape.

    What it then does may depend on all records of the batch, for inputs that no synthetic batch shows. So it gets one at a time.
    """
    inputs, targets = synthetic(example, 2, torch.Generator().manual_seed(_SEED), device)
    with _buffers_restored(model), torch.inference_mode(), torch.random.fork_rng(), _ListReads() as lists, _ValueReads() as reads:
        try:
            output = call_model(model, inputs)
        except Exception as problem:
            raise ModelRefused(f"the model does not run on inputs like the data's, {described(inputs)}: {problem}") from problem
        try:
            loss_fn(output, targets)
        except Exception as problem:
            raise ModelRefused(
                f"the loss function does not take the model's output, {described(output)}, with targets like the data's, "
                f"{described(targets)}: {problem}"
            ) from problem
        return bool(reads.found or lists.found)


def check_rows(
    model: nn.Module, loss_fn: LossFunction, example: tuple[Any, Any], device: torch.device, *, recordwise: bool = False
) -> None:
    """Refuse, by name, a loss that is not one value per record, batch statistics, state, and NaN at the start.

    `recordwise`: the model will see one record at a time, so only state and losses matter.
    """
    generator = torch.Generator().manual_seed(_SEED)
    batch, others = synthetic(example, _ALL, generator, device), synthetic(example, _ALL, generator, device)
    with _buffers_restored(model) as buffers:
        first = _Run(model, loss_fn, batch, recordwise=recordwise)
        if first.losses.shape != (_ALL,):
            raise ModelRefused(
                f"the loss function must return one value per record: for {_ALL} records it returned shape "
                f"{tuple(first.losses.shape)}. Pass reduction='none', and average what a record has of its own."
            )
        again = _Run(model, loss_fn, batch, recordwise=recordwise)
        _refuse_difference(model, first, again, "keeps state from one call to the next")
        if not recordwise:
            _refuse_mixing(model, loss_fn, batch, others)
            for keep in (1.0, 0.0):
                with other_weights(model.parameters(), keep=keep):
                    _refuse_mixing(model, loss_fn, batch, others)
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                raise ModelRefused(
                    f"buffer '{name}' of {_owner(model, name)} changes in the forward pass: running statistics of private data are "
                    "a release that nothing accounts for. Use GroupNorm or LayerNorm, or put the module in eval mode."
                )
    if not bool(torch.isfinite(first.losses).all()):
        raise ModelRefused(
            f"the loss is {first.losses[~torch.isfinite(first.losses)][0].item()} before the first step, on synthetic inputs "
            "between 0 and 1. Check the initial weights and the loss function."
        )


def _refuse_mixing(model: nn.Module, loss_fn: LossFunction, batch: Any, others: Any) -> None:
    kept = torch.tensor(_KEPT)
    index = torch.arange(_ALL) + _ALL
    index[kept] = kept
    try:
        first = _Run(model, loss_fn, batch)
    except Exception:  # a black box may refuse what other weights give it
        return
    for factor in (10, -10, 1_000, -1_000):  # so that a mean over records moves visibly, and sums change their sign
        try:
            second = _Run(model, loss_fn, choose(join([batch, _other(batch, others, factor)]), index))
        except Exception:  # or values out of its range
            continue
        _refuse_difference(model, first, second, "mixes records: a record's value changes with the other records of its batch")
    with without_dropout(model):
        first = _Run(model, loss_fn, batch)
        if _same(
            first.losses, _Run(model, loss_fn, batch, seed=1).losses
        ):  # nothing random is left: places and sizes can be compared
            fewer = _Run(model, loss_fn, choose(batch, kept), kept=(0, 1))
            what = "mixes records: a record's value changes with its place in the batch or with the batch's size"
            _refuse_difference(model, first, fewer, what)


@contextmanager
def other_weights(weights: Iterable[nn.Parameter], *, keep: float) -> Iterator[None]:
    """The model with `keep` times these weights plus noise, for a while: what a layer that starts at zero hides shows here."""
    generator = torch.Generator().manual_seed(_SEED)
    parameters = [p for p in weights if p.is_floating_point()]
    copies = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p in parameters:
                noise = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
                p.mul_(keep).add_(noise, alpha=0.5 / max(1, p[0].numel() if p.dim() > 1 else 1) ** 0.5)
        yield
    finally:
        with torch.no_grad():
            for p, copy in zip(parameters, copies, strict=True):
                p.copy_(copy)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Two passes would differ by their dropout masks."""
    active = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    try:
        for module in active:
            module.training = False
        yield
    finally:
        for module in active:
            module.training = True


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

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: tuple[Any, Any],
        *,
        seed: int = 0,
        kept: tuple[int, ...] = _KEPT,
        recordwise: bool = False,
    ) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        self.kept = torch.tensor(kept)
        handles = [
            module.register_forward_hook(self._note(name))
            for name, module in model.named_modules()
            if not any(True for _ in module.children())
        ]
        parts = [row(batch, i) for i in range(count(batch))] if recordwise else [batch]
        try:
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(seed)
                outputs = [call_on_copy(model, inputs) for inputs, _ in parts]
                losses = [loss_fn(output, targets) for output, (_, targets) in zip(outputs, parts, strict=True)]
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(losses[0], Tensor):
            raise ModelRefused(f"the loss function must return a tensor with one value per record, not {type(losses[0]).__name__}.")
        self.output, self.losses = join(outputs) if recordwise else outputs[0], losses[0]
        if recordwise and losses[0].dim() > 0:
            self.losses = torch.cat(losses)

    def _note(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            self.calls.append((name, pytree.tree_map(_cloned, inputs), pytree.tree_map(_cloned, output)))

        return note


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _refuse_difference(model: nn.Module, first: _Run, second: _Run, what: str) -> None:
    """If the kept records differ between the two runs, say where the difference begins."""
    if _same(choose(first.output, first.kept), choose(second.output, second.kept)):
        if _same(first.losses[first.kept], second.losses[second.kept]):
            return
        raise ModelRefused(f"the loss function {what}.")
    for (name, inputs, output), (_, other_inputs, other_output) in zip(first.calls, second.calls, strict=False):
        if not _same_rows(inputs, other_inputs, first, second):
            raise ModelRefused(f"an operation before '{name}' {what}. {_ADVICE}")
        if not _same_rows(output, other_output, first, second):
            kind = type(model.get_submodule(name)).__name__
            raise ModelRefused(f"'{name}' ({kind}) {what}. {_ADVICE}")
    raise ModelRefused(f"an operation in the forward of {type(model).__name__} {what}. {_ADVICE}")


_ADVICE = "Nothing bounds a record's influence then. Use GroupNorm or LayerNorm instead of batch statistics."


def _same_rows(first: Any, second: Any, one: _Run, two: _Run) -> bool:
    """Compare the kept records in tensors that carry records along the first axis."""
    return all(
        _same(a[one.kept], b[two.kept])
        for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=False)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() > 0
        if len(a) == len(one.losses) and len(b) == len(two.losses)
    )


def _same(first: Any, second: Any) -> bool:
    return all(
        _close(a, b) for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True) if isinstance(a, Tensor)
    )


def _close(first: Tensor, second: Tensor) -> bool:
    """Equal up to rounding, for small values too."""
    if first.shape != second.shape:
        return False
    a, b = first.double(), second.double()
    largest = float(a.nan_to_num(0, 0, 0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=max(1e-5 * min(1.0, largest), 1e-9), equal_nan=True)


class _ValueReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether any tensor becomes a Python number or truth value, or a shape that depends on values (`len(x[x > 0])`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= _depends_on_values(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _ListReads(TorchFunctionMode):
    """Notes `.tolist()`, which reads memory without an operation that the mode above could see."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is Tensor.tolist
        return func(*args, **(kwargs or {}))


def _depends_on_values(func: Any, args: Any, kwargs: Any) -> bool:
    """By torch's own tags, which are too wide for two operations: indexing by numbers, one-hot with a given number of classes."""
    name = func.overloadpacket.__name__
    if torch.Tag.data_dependent_output in func.tags or name in ("is_nonzero", "equal", "allclose"):
        return True
    if name == "index":
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "one_hot":
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0)
    return torch.Tag.dynamic_output_shape in func.tags


def _other(batch: Any, others: Any, factor: float) -> Any:
    """Records that surely differ from `batch`: input floats of `others` times `factor`, whole numbers 0 and 1 swapped."""

    def change(scale: float) -> Callable[[Any, Any], Any]:
        def one(leaf: Any, other: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return other * scale if leaf.is_floating_point() or leaf.is_complex() else (leaf == 0).to(leaf.dtype)

        return one

    (inputs, targets), (other_inputs, other_targets) = batch, others
    return pytree.tree_map(change(factor), inputs, other_inputs), pytree.tree_map(change(1), targets, other_targets)


def _owner(model: nn.Module, buffer: str) -> str:
    path = buffer.rpartition(".")[0]
    return f"'{path}' ({type(model.get_submodule(path)).__name__})" if path else f"the model ({type(model).__name__})"
