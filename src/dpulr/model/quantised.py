"""What torch's own quantisation does across records: observers that learn ranges, and scales that are taken per batch."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from dpulr.errors import ModelRefused


def refuse_observers(model: nn.Module) -> None:
    """Observers note the range of whatever passes through them: a release of private data that nothing accounts for."""
    torch_ao: Any = sys.modules.get("torch.ao.quantization")
    if torch_ao is None:  # never imported: no module can be of its kinds
        return
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch_ao.FakeQuantizeBase):
            inside.update(module.modules())
            if bool((module.observer_enabled == 1).any()):
                raise ModelRefused(
                    f"'{name}' ({type(module).__name__}) has an observer that learns the range of what passes through it: a "
                    "release of private data that nothing accounts for. Let it learn on public data, then freeze it: "
                    "model.apply(torch.ao.quantization.disable_observer)."
                )
        elif isinstance(module, torch_ao.ObserverBase) and module not in inside and list(module.buffers()):
            raise ModelRefused(
                f"'{name}' ({type(module).__name__}) is an observer that learns the range of what passes through it: a release of "
                "private data that nothing accounts for. Let it learn on public data, then call torch.ao.quantization.convert."
            )


def is_dynamic(module: nn.Module) -> bool:
    """Whether the layer takes the scale of its input from the batch."""
    return type(module).__module__.startswith("torch.ao.nn.quantized.dynamic")


DYNAMIC = (
    "Dynamic quantisation takes one scale per batch, so that a record's rounding depends on the others. Use static scales, learned "
    "on public data: torch.ao.quantization.prepare, some public batches, convert."
)
