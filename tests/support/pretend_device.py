"""A device that is none: tensors that say they lie on it, hold their values on the CPU, and refuse what an accelerator refuses.

For code that must run on a GPU, where there is no GPU to try it. A tensor created without `device=` meets one that has it, and is
refused, as on a real device; tensors that leave it (`.cpu()`, `.tolist()`) are counted, by where in the package they do. It says
nothing about the numerics or the speed of a real device.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

SOURCE = Path(__file__).parents[2] / "src"
aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default, aten.to.other}
INDEX_FROM_CPU = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
"""A real device takes an index that lies on the CPU."""


class _Module:
    """What torch asks of a device: `torch.pretend`."""

    def __init__(self) -> None:
        self.state = torch.zeros(8, dtype=torch.uint8)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        self.state = torch.full((8,), seed % 251, dtype=torch.uint8)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return self.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        self.state = state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


MODULE = _Module()
_setup_privateuseone_for_python_backend("pretend", MODULE)
DEVICE = torch.device("pretend", 0)


class OnDevice(Tensor):
    """A tensor on the device. `held`: its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        tensor: OnDevice = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
            requires_grad=False,
        )
        tensor.held = held
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of PretendDevice()")


class DeviceGenerator(torch.Generator):
    """What `torch.Generator("pretend")` makes: a generator whose numbers appear on the device."""


_REAL_GENERATOR = torch.Generator


class _Kinds(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _REAL_GENERATOR)


class _Generator(torch.Generator, metaclass=_Kinds):
    """What `torch.Generator` is meanwhile."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        return DeviceGenerator() if torch.device(device).type == DEVICE.type else _REAL_GENERATOR(device)


class _Calls(TorchFunctionMode):
    """What can be seen in calls alone: which generator was given, and `tolist`."""

    def __init__(self, left: Counter[str]) -> None:
        super().__init__()
        self.left = left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and isinstance(args[0], OnDevice):
            self.left[_line()] += 1
            return args[0].held.tolist()
        given = (kwargs or {}).get("generator")
        device = (kwargs or {}).get("device")
        if given is not None and isinstance(given, DeviceGenerator) != (torch.device(device or "cpu").type == DEVICE.type):
            raise RuntimeError(f"Expected a generator of {device or 'cpu'}: {func} got {type(given).__name__}.")
        return func(*args, **(kwargs or {}))


class PretendDevice(TorchDispatchMode):
    """While entered, `device="pretend"` works. `left`: where in the package tensors left the device, and how often.

    Single numbers (`.item()`) may leave it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: Counter[str] = Counter()
        self._calls = _Calls(self.left)

    def __enter__(self) -> PretendDevice:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) goes through here
        torch.__future__.set_swap_module_params_on_conversion(True)  # module.to(device) takes tensors of another type
        torch.Generator = _Generator  # type: ignore[misc]
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        super().__exit__(*error)
        torch.Generator = _REAL_GENERATOR  # type: ignore[misc]
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inside = any(isinstance(tensor, OnDevice) for tensor in tensors)
        devices = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
        asked = devices[0] if devices else args[1].device if func is aten.to.other else None
        here = torch.device("cpu")
        if func is aten.copy_.default and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
            return self._copied(*args)
        stays = inside if asked is None else asked.type == DEVICE.type
        if inside and func not in MOVES:
            self._refuse_mixtures(func, args, tensors)
        own = pytree.tree_map_only(torch.device, lambda device: here, (args, kwargs))
        out = func(*_unwrapped(own[0]), **_unwrapped(own[1]))
        if inside and not stays and any(tensor.numel() > 1 for tensor in tensors):
            self.left[_line()] += 1
        if not stays:
            return out
        wrapped = pytree.tree_map_only(Tensor, _wrapped, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if inside and asked is None else wrapped

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(source, OnDevice) and source.numel() > 1:
            self.left[_line()] += 1
        _unwrapped(target).copy_(_unwrapped(source))
        return target

    def _refuse_mixtures(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        others = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
        if others and not (func in INDEX_FROM_CPU and isinstance(args[0], OnDevice)):
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} got one of {DEVICE} and one of the cpu.")


def _line() -> str:
    """The innermost line of the package that is running."""
    for frame in reversed(traceback.extract_stack()):
        if Path(frame.filename).is_relative_to(SOURCE):
            return f"{Path(frame.filename).relative_to(SOURCE)}: {frame.name}"
    return "outside"


def _unwrapped(tree: Any) -> Any:
    return pytree.tree_map_only(OnDevice, lambda tensor: tensor.held, tree)


def _wrapped(tensor: Tensor) -> Tensor:
    if isinstance(tensor, OnDevice):
        return tensor
    with torch.inference_mode(False):  # such tensors can't be viewed outside of it
        return OnDevice(tensor)


def values(tensor: Tensor) -> Tensor:
    """What a tensor holds, for the test to look at."""
    return tensor.held if isinstance(tensor, OnDevice) else tensor.detach()
