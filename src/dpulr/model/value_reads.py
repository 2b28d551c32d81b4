"""What a forward pass does besides computing rows: does it read values, draw random numbers, call operators from outside of torch?

Found on synthetic inputs, before anything else is tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpulr.errors import BlackBoxError, ModelRefused
from dpulr.model.batches import call_model, described, synthetic
from dpulr.model.equal_rows import draws_numbers, of_torch
from dpulr.model.losses import LossFunction
from dpulr.model.scratch import Scratch

_SEED = 20_240_229  # public: only synthetic inputs depend on it
_RECORDS, _UNTIL_COMPILED = 2, 3
_FROM_NOTHING = frozenset({"arange", "eye", "full", "linspace", "ones", "zeros"})  # none of these takes a tensor


@dataclass(frozen=True)
class Seen:
    """What one pass has shown.

    reads  why the model must see one record at a time, in words; None where it need not
    draws  whether it draws random numbers
    bytes  what the operations of a pass return for one record
    """

    reads: str | None
    draws: bool
    bytes: int


def observe(model: nn.Module, loss_fn: LossFunction, example: tuple[Any, Any], device: torch.device) -> Seen:
    """Run the model once on synthetic inputs.

    A pass that turns a tensor into a Python number, as `if x.sum() > 0` does, or into a shape, may do with a record what another
    one decides, for inputs that no synthetic batch shows. The same holds for operators from outside of torch, into which nothing
    here can look. Such a model gets one record at a time. What is computed of parameters and buffers alone (the scale of a
    quantised layer) says nothing about a record, and may be read.
    """
    parts = [part for part in (model, loss_fn) if isinstance(part, nn.Module)]
    constants = _Constants(tensor for part in parts for tensor in (*part.parameters(), *part.buffers()))
    inputs, targets = synthetic(example, _RECORDS, torch.Generator().manual_seed(_SEED), device)
    with ExitStack() as stack:
        for context in (Scratch.of(model).fresh(), torch.inference_mode(), torch.random.fork_rng()):
            stack.enter_context(context)
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            _let_compile(model, inputs)
        lists, seen = stack.enter_context(_Lists(constants)), stack.enter_context(_Operations(constants))
        try:
            output = call_model(model, inputs)
        except BlackBoxError:
            raise
        except Exception as problem:
            found = {leaf.dtype for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)}
            other = torch.float64 in found and all(p.dtype == torch.float32 for p in model.parameters())
            hint = " (The data is in float64, the model in float32: convert the data by .float().)" if other else ""
            raise ModelRefused(
                f"the model does not run on inputs like the data's, {described(inputs)}: {problem}{hint}"
            ) from problem
        try:
            loss_fn(output, targets)
        except BlackBoxError:
            raise
        except Exception as problem:
            raise ModelRefused(
                f"the loss function does not take the model's output, {described(output)}, with targets like the data's, "
                f"{described(targets)}: {problem}"
            ) from problem
    reads = None
    if seen.read or lists.read:
        reads = "the forward pass or the loss reads the value of a tensor, as an `if` or .item() does"
    elif seen.foreign is not None:
        reads = f"the forward pass or the loss calls {seen.foreign}, an operator from outside of torch, which may read values"
    return Seen(reads, seen.draws, max(1, seen.bytes // _RECORDS))


def _let_compile(model: nn.Module, inputs: Any) -> None:
    """In its first passes TorchScript compares constants of its own with each other. That reads no record's values."""
    with suppress(Exception):  # what the model raises is told below
        for _ in range(_UNTIL_COMPILED):
            call_model(model, inputs)


class _Constants:
    """Tensors that no record has a part in: parameters, buffers, zeros and ones, and what is computed of them alone.

    Told by their storage; they are held, so that no other tensor gets it. A tensor that came in any other way is none of them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._held: dict[int, Tensor] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        self._held |= {key: tensor for tensor in tensors for key in [_storage(tensor)] if key is not None}

    def remove(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._held.pop(_storage(tensor) or 0, None)

    def has(self, tensors: list[Tensor]) -> bool:
        return bool(tensors) and all(_storage(tensor) in self._held for tensor in tensors)


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return None


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether any tensor becomes a Python number or truth value, or a shape that depends on values (`len(x[x > 0])`)."""

    def __init__(self, constants: _Constants) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = constants
        self.read = self.draws = False
        self.foreign: str | None = None
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        constant = self.constants.has(_tensors((args, kwargs))) or func.overloadpacket.__name__ in _FROM_NOTHING
        draws = draws_numbers(func, args, kwargs)
        self.draws |= draws
        if not constant:
            self.read |= _depends_on_values(func, args, kwargs)
        if draws or not constant:
            self.constants.remove(_overwritten(func, args, kwargs))
        if not of_torch(func):
            self.foreign = func.name()
        out = func(*args, **kwargs)
        found = _tensors(out)
        if constant and not draws and of_torch(func):
            self.constants.add(found)
        self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in found)
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    written = [argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return _tensors([given.get(name) for name in written])


class _Lists(TorchFunctionMode):
    """Notes `.tolist()`, which reads memory without an operation that the mode above could see."""

    def __init__(self, constants: _Constants) -> None:
        super().__init__()
        self.constants, self.read = constants, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= func is Tensor.tolist and not self.constants.has(_tensors(args))
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
