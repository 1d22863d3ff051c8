"""Reading JSON objects strictly: just the fields that were written, each of its kind. All raise ValueError, naming the field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from .spec import Policy
from .validate import integer


def record(name: str, value: object, fields: Iterable[str]) -> dict[str, Any]:
    """An object of just these fields, given as it is or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} must be JSON, got what is none: {error}") from None
    wanted = set(fields)
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object with {', '.join(sorted(wanted))}, got {value!r}")
    if missing := wanted - set(value):
        raise ValueError(f"{name} must have {', '.join(sorted(missing))}, got {', '.join(sorted(value))}")
    if unknown := set(value) - wanted:
        raise ValueError(f"{name} must have no other fields than {', '.join(sorted(wanted))}, got {', '.join(sorted(unknown))}")
    return value


def policy_of(name: str, value: object) -> Policy:
    """A policy, of an object with its fields."""
    entries = record(name, value, (field.name for field in dataclasses.fields(Policy)))
    try:
        return Policy(**entries)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None


def size(name: str, value: object) -> None:
    """Refuse anything but bytes: a non-negative int that 62 bits hold."""
    integer(name, value)
    if not 0 <= value < 2**62:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number of bytes, non-negative and below 2**62, got {value}")
