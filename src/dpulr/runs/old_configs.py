"""Run folders of version 0.1.0: their config.json names no version, and some of their settings are gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpulr.errors import UsageError

OLD = "0.1.0"


def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json in today's words; one of another version stays as it is.

    Every config.json of 0.1.0 has a setting `average`, and none names its version.
    """
    if "version" in values or "average" not in values:
        return dict(values)
    found = {name: value for name, value in values.items() if name != "average"}
    if values["average"] != 0:
        raise _refused("average", values["average"], "a moving average of the weights")
    options = found.get("mechanism_options", {})
    if isinstance(options, dict) and values.get("mechanism") == "hidden-direction":
        found["mechanism_options"] = _hidden_direction(options)
    return found


def _hidden_direction(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was then the default is said, where the default is another today."""
    found = {"antithetic": True, **options}
    frames = found.pop("frames", 1)
    if frames != 1:
        raise _refused("mechanism.frames", frames, "orthonormal frames of directions")
    if "blocks" in found:
        found["groups"] = found.pop("blocks")
    return found


def _refused(name: str, value: object, what: str) -> UsageError:
    return UsageError(
        f"this is a run of dpulr {OLD} with {what} ({name} = {value!r}), which later versions do not have. "
        f"Go on with it by version {OLD}."
    )
