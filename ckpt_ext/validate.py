"""Checks of what users pass in, made once at the public edge; each raises `ValueError("{name} must ..., got {value}")`."""

from collections.abc import Mapping, Sequence

from torch import Tensor


def positive_int(name: str, value: object) -> None:
    """Refuse anything but an int above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} must be a positive int, got {value!r}")


def probability(name: str, value: object) -> None:
    """Refuse anything outside [0, 1]; NaN is outside."""
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability in [0, 1], got {value!r}")


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse anything that is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def floating(name: str, tensor: Tensor) -> None:
    """Refuse tensors whose dtype no kernel computes in."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
        raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")


def same_device(name: str, tensor: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors that lie on another device than `tensor`."""
    for other, value in others.items():
        if value is not None and value.device != tensor.device:
            raise ValueError(f"{other} must be on {name}'s device {tensor.device}, got {value.device}")
