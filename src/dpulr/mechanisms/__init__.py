"""Mechanisms: how a step turns records into a private gradient. One file each; `register` adds one of your own."""

from __future__ import annotations

from dpulr.mechanisms.base import FittedMechanism, Mechanism, SitewiseMechanism, WorstCase
from dpulr.mechanisms.gaussian import Gaussian
from dpulr.mechanisms.gradient import Gradient
from dpulr.mechanisms.hidden_direction import HiddenDirection
from dpulr.mechanisms.known import by_name, kind_of, register, registry
from dpulr.mechanisms.zeroth_order import ZerothOrder

__all__ = [
    "FittedMechanism",
    "Gaussian",
    "Gradient",
    "HiddenDirection",
    "Mechanism",
    "SitewiseMechanism",
    "WorstCase",
    "ZerothOrder",
    "by_name",
    "kind_of",
    "register",
    "registry",
]

for _kind in (HiddenDirection, Gaussian, Gradient, ZerothOrder):
    register(_kind)
