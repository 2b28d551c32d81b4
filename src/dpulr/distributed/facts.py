"""What all ranks of a run must have in common, in words that a refusal can quote. Public settings, and hashes."""

from __future__ import annotations

import platform
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dpulr
from dpulr.distributed.ranks import Alone, digest_of
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.base import FittedMechanism, Mechanism
from dpulr.plan import Request
from dpulr.records import Records


def facts(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Any,
    mechanism: Mechanism,
    request: Request,
    records: Records,
    ranks: Alone,
    settings: dict[str, Any],
    key: bytes,
) -> dict[str, str]:
    """By name, in the order in which they are compared: what explains most comes first. `key` is for hashes of what is private."""
    versions = {
        "dpulr": dpulr.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    found = {f"version of {name}": version for name, version in versions.items()}
    found |= {name: str(value) for name, value in settings.items()}
    found |= {item.name: str(getattr(request, item.name)) for item in fields(request)}
    found["mechanism"] = repr(mechanism)
    found["model"] = str(model)
    found["choice of trained parameters"] = ", ".join(name for name, value in model.named_parameters() if value.requires_grad)
    found["loss function"] = described(loss_fn)
    found["optimizer"] = repr(optimizer)
    found["schema"] = str(records.schema)
    found["initial value of the parameters (a seed for them may be missing)"] = digest_of(model.state_dict().values())
    if not ranks.sharded:
        found["data set (if each rank has its own part, say sharded=True)"] = records.sample_digest(key)
    return found


def described(value: Any, depth: int = 4) -> str:
    """A function or a module with its numbers, in words that are the same in every process: no addresses, no devices."""
    if isinstance(value, Tensor):
        return digest_of([value])
    if isinstance(value, float | None):
        return repr(value)
    if depth == 0:
        return "..."
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        return f"partial({', '.join(described(part, depth - 1) for part in parts)})"
    if isinstance(value, nn.Module):
        plain = {name: own for name, own in vars(value).items() if isinstance(own, bool | int | float | str) and name[0] != "_"}
        return f"{value} {plain or ''} {digest_of(value.state_dict().values())}"
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    kept = [described(cell, depth - 1) for cell in cells if callable(cell) or isinstance(cell, float | Tensor)]
    return " ".join([getattr(value, "__qualname__", type(value).__qualname__), *kept])


def check_shareable(fitted: FittedMechanism[Any], request: Request) -> None:
    """Refuse what several ranks can't do."""
    if type(fitted).privatise is not FittedMechanism.privatise:
        raise InvalidArgument(f"{type(fitted).__name__} adds its noise in its own way, which several ranks can't share: use one.")
    if request.sampling != "poisson" or request.rejection_threshold != 0:
        raise InvalidArgument(
            "several ranks draw Poisson samples, each of its own records: sampling must be 'poisson' and rejection_threshold 0, as "
            "no rank knows the size of the whole batch."
        )


def gathered_records(dataset: Any, device: torch.device, schema: Any, ranks: Alone, num_workers: int = 0) -> Records:
    """The rank's records. One whose shard is empty learns from the others what records look like."""
    if not ranks.sharded:
        return Records(dataset, device, schema=schema, num_workers=num_workers)
    own = Records(dataset, device, schema=schema, num_workers=num_workers) if len(dataset) else None
    known = [other for other in ranks.gathered(None if own is None else own.schema) if other is not None]
    if own is not None:
        return own
    if not known:
        return Records(dataset, device)  # refused: there is no record at all
    return Records(dataset, device, schema=known[0], may_be_empty=True)
