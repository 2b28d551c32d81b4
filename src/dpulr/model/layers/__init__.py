"""Layer kinds. `rule_for` finds the rule of a module; `register` adds one for a layer of your own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dpulr.model.layers.affine import ConvRule, LinearRule
from dpulr.model.layers.base import Call, LayerRule, WeightLinearRule
from dpulr.model.layers.embedding import EmbeddingBagRule, EmbeddingRule
from dpulr.model.layers.norm import GroupNormRule, LayerNormRule
from dpulr.model.layers.scripted import ScriptRule
from dpulr.model.layers.straight_through import StraightThroughRule, straight_through

__all__ = ["Call", "LayerRule", "WeightLinearRule", "is_foreign", "register", "rule_for"]

_RULES: dict[type[nn.Module], type[LayerRule]] = {
    nn.Linear: LinearRule,
    nn.Conv1d: ConvRule,
    nn.Conv2d: ConvRule,
    nn.Conv3d: ConvRule,
    nn.Embedding: EmbeddingRule,
    nn.EmbeddingBag: EmbeddingBagRule,
    nn.LayerNorm: LayerNormRule,
    nn.RMSNorm: LayerNormRule,
    nn.GroupNorm: GroupNormRule,
}
_OWN = dict(_RULES)


def register(kind: type[nn.Module], rule: type[LayerRule]) -> None:
    """Use `rule` for modules of exactly this class. It is tried on synthetic inputs whenever a model is set up."""
    _RULES[kind] = rule


def is_foreign(rule: LayerRule) -> bool:
    """Whether the rule was registered from outside, be it one of the package's own for another layer."""
    if isinstance(rule, StraightThroughRule):
        return False
    return type(rule) not in (LayerRule, ScriptRule) and _OWN.get(type(rule.module)) is not type(rule)


def has_rule(module: nn.Module) -> bool:
    return type(module) in _RULES


def rule_for(module: nn.Module, parameters: Mapping[str, nn.Parameter], call: Call | None = None) -> LayerRule:
    """The rule of the module's own class; any other module is perturbed in its weights.

    So is a known one that was changed: by a hook of the user, or by parameters of other names (weight normalisation). `call`, on
    synthetic inputs, shows layers that round their weights.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return ScriptRule(module, parameters)
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    kind = LayerRule if changed else _RULES.get(type(module), LayerRule)
    if kind.handles is not None and not kind.handles.issuperset(parameters):
        kind = LayerRule
    if kind is EmbeddingBagRule and not EmbeddingBagRule.knows(module, call):
        kind = LayerRule
    rounded = straight_through(module, parameters, call) if kind is LayerRule and call is not None else None
    return rounded or kind(module, parameters)
