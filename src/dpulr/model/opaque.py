"""Programs in the shape of a module: TorchScript, torch.export, torch.compile.

What lies inside a program is never called by itself, so a program is one layer: frozen it is a box, trained it is moved in its
weights. A compiled module is run as it was before it was compiled: the same function, in which layers can be moved.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import fx, nn

from dpulr.errors import ModelRefused


def is_program(module: nn.Module) -> bool:
    """Whether the module is TorchScript, or a graph that uses parameters of modules without calling them (torch.export)."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if not isinstance(module, fx.GraphModule) or module.meta.get("layers inside"):  # model/exported.py
        return False
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return any(node.op == "get_attr" and node.target in parameters for node in module.graph.nodes)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that was compiled; any other as it is. A program that is no module is refused with what to give instead."""
    if isinstance(model, torch.export.ExportedProgram):
        raise ModelRefused("the model is an ExportedProgram, which is no module. Give its .module(), and the optimizer that one's.")
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def without_compiling(model: nn.Module) -> AbstractContextManager[None]:
    """While it lasts, compiled parts of the model run as they were written."""
    compiled = any("_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") for module in modules_of(model))
    if not compiled or not hasattr(torch.compiler, "set_stance"):  # before torch 2.6: compiled they stay
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The same as `model.modules()`, but quick: every step asks."""
    found, seen = [model], {model}
    for module in found:
        for child in module._modules.values():
            if child is not None and child not in seen:
                found.append(child)
                seen.add(child)
    return found
