"""What a forward pass does besides computing rows: does it read values, draw random numbers, call operators from outside of torch?

Found on synthetic inputs, before anything else is tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpulr.errors import ModelRefused
from dpulr.model.batches import call_model, described, synthetic
from dpulr.model.equal_rows import draws_numbers, of_torch
from dpulr.model.losses import LossFunction
from dpulr.model.scratch import Scratch

_SEED = 20_240_229  # public: only synthetic inputs depend on it
_RECORDS = 2


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
    here can look. Such a model gets one record at a time.
    """
    inputs, targets = synthetic(example, _RECORDS, torch.Generator().manual_seed(_SEED), device)
    with Scratch.of(model).fresh(), torch.inference_mode(), torch.random.fork_rng(), _Lists() as lists, _Operations() as seen:
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
    reads = None
    if seen.read or lists.read:
        reads = "the forward pass or the loss reads the value of a tensor, as an `if` or .item() does"
    elif seen.foreign is not None:
        reads = f"the forward pass or the loss calls {seen.foreign}, an operator from outside of torch, which may read values"
    return Seen(reads, seen.draws, max(1, seen.bytes // _RECORDS))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether any tensor becomes a Python number or truth value, or a shape that depends on values (`len(x[x > 0])`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = self.draws = False
        self.foreign: str | None = None
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= _depends_on_values(func, args, kwargs or {})
        self.draws |= draws_numbers(func, args, kwargs or {})
        if not of_torch(func):
            self.foreign = func.name()
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        return out


class _Lists(TorchFunctionMode):
    """Notes `.tolist()`, which reads memory without an operation that the mode above could see."""

    def __init__(self) -> None:
        super().__init__()
        self.read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= func is Tensor.tolist
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
