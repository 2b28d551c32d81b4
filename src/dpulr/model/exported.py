"""A model as a program (torch.export, dynamic batch dimension): where torch.fx can't take it apart, or its forward reads values.

An export runs the model on tensors without values: what it captures can't branch on a record. Every trained layer stays a module of
its own in the program, which calls the very objects of the model. What a layer puts out for the whole batch at once (positions, a
class token, a bias of attention) becomes a module that gives it to each record, so that each record can have its own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dpulr.model.batches import call_on_copy
from dpulr.model.exported_layers import layer_calls, layers_in, no_fused_layers, standing_for
from dpulr.model.exported_program import Builder, overwrites
from dpulr.model.graph import Untraceable
from dpulr.model.losses import LossFunction


class Exported(NamedTuple):
    """The program, and the loss of what it puts out: the model's output if that is a tensor, else the tensors in it, in order."""

    program: fx.GraphModule
    loss_fn: LossFunction


def export(model: nn.Module, loss_fn: LossFunction, probes: list[tuple[Any, Any]]) -> Exported:
    """Raises Untraceable. The probes are synthetic batches of two sizes."""
    inputs = probes[1][0]
    names = list(inputs) if isinstance(inputs, dict) else [f"input_{i}" for i in range(len(pytree.tree_leaves(inputs)))]
    flat = pytree.tree_leaves(inputs)
    if len(names) != len(flat) or not all(isinstance(leaf, Tensor) for leaf in flat):
        raise Untraceable("its inputs are nested")
    whole = _Whole(model, pytree.tree_structure(inputs))
    records = torch.export.Dim("records")
    try:
        with no_fused_layers(), _quiet(), torch.no_grad():
            calls, kind = layer_calls(model, layers_in(model), probes)
            with standing_for(calls):
                found = torch.export.export(whole, tuple(flat), dynamic_shapes=(tuple({0: records} for _ in flat),), strict=False)
                if any(overwrites(node) for node in found.graph.nodes):
                    found = found.run_decompositions({})
    except Untraceable:
        raise
    except Exception as problem:  # whatever an export may raise on a user's forward
        raise Untraceable(f"torch.export: {str(problem).strip().split(chr(10), 1)[0]}") from problem
    if any(output.kind.name != "USER_OUTPUT" for output in found.graph_signature.output_specs):
        raise Untraceable("its forward pass writes into the model")
    program = Builder(whole, names, calls, found).program()
    program.train(model.training)
    spec = found.call_spec.out_spec
    if spec.is_leaf():
        return Exported(program, loss_fn)

    def loss(output: Any, targets: Any) -> Tensor:
        filled = pytree.tree_unflatten(output, spec)
        return loss_fn(kind(**filled) if issubclass(kind, Mapping) else filled, targets)

    return Exported(program, loss)


class _Whole(nn.Module):
    """The model with flat inputs. Of an output with names, the tensors: a cache of keys, say, is no part of any loss."""

    def __init__(self, model: nn.Module, inputs: pytree.TreeSpec) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *flat: Tensor) -> Any:
        output = call_on_copy(self.model, pytree.tree_unflatten(flat, self.inputs))
        if not isinstance(output, Mapping):
            return output
        return {name: value for name, value in output.items() if isinstance(value, Tensor)}


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch says of its inner workings while it exports, or fails to, is nobody's matter."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)
