"""Checks of what users pass in, made once at the public edge; each raises `ValueError("{name} must ..., got {value}")`."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def positive_int(name: str, value: object) -> None:
    """Refuse anything but an int above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} must be a positive int, got {value!r}")


def integer(name: str, value: object) -> None:
    """Refuse anything but an int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an int, got {value!r}")


def probability(name: str, value: object) -> None:
    """Refuse anything outside [0, 1]; NaN is outside."""
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability in [0, 1], got {value!r}")


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse anything that is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def number(name: str, value: object) -> None:
    """Refuse anything but a finite int or float."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def score_scale(name: str, value: object) -> None:
    """Refuse a factor of scores that is no finite number, or so large that float32 scores could not be."""
    number(name, value)
    if not abs(value) <= 1e30:  # type: ignore[arg-type]
        raise ValueError(f"{name} must be at most 1e30 in size, got {value}")


def window_size(name: str, value: object) -> None:
    """Refuse a sliding window that is neither None nor a positive int."""
    if value is not None:
        positive_int(name, value)


def bound(name: str, value: object) -> None:
    """Refuse a bound of scores that is neither None nor positive."""
    if value is not None:
        number(name, value)
        # float32 must hold it, and its inverse.
        if not 1e-30 <= value <= 1e30:  # type: ignore[operator]
            raise ValueError(f"{name} must be between 1e-30 and 1e30, got {value}")


def instance(name: str, value: object, kind: type) -> None:
    """Refuse anything but a `kind`."""
    if not isinstance(value, kind):
        shown = "a Tensor" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} must be a {kind.__name__}, got {shown}")


def is_floating(tensor: Tensor) -> bool:
    """Whether the kernels compute in the tensor's dtype: no integers, complex numbers or 8-bit floats."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1


def widened(dtype: torch.dtype) -> torch.dtype:
    """What sums, softmax and statistics of `dtype` are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_integer(tensor: Tensor) -> bool:
    """Whether the tensor holds integers; bools are none."""
    return not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())


def floating(name: str, tensor: Tensor) -> None:
    """Refuse tensors whose dtype no kernel computes in."""
    if not is_floating(tensor):
        raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")


def computable(name: str, tensor: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors whose dtype no kernel computes in, empty rows, DTensors, and `others` that lie on another device than `tensor`."""
    floating(name, tensor)
    _local(name, tensor)
    if tensor.dim() == 0 or tensor.size(-1) == 0:
        raise ValueError(f"{name} must have at least one element in a row, got shape {list(tensor.shape)}")
    for other, value in others.items():
        if value is None:
            continue
        floating(other, value)
        _local(other, value)
        if value.device != tensor.device:
            raise ValueError(f"{other} must be on {name}'s device {tensor.device}, got {value.device}")


def _local(name: str, tensor: Tensor) -> None:
    """Refuse DTensors, which the engine would take for whole tensors."""
    # Plain tensors first: a compiler that traces this does not know the modules of their classes.
    if type(tensor) not in (Tensor, torch.nn.Parameter) and type(tensor).__module__.startswith("torch.distributed.tensor"):
        raise NotImplementedError(f"{name} must be a plain tensor, got a {type(tensor).__name__}: its to_local() or full_tensor() is one")
