"""Which row of the tile tables a device takes: the architecture of its GPU, or the nearest known one below it."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch

NVIDIA = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""The NVIDIA architectures that the tables have a row for, oldest first."""

AMD = ("gfx942",)
"""The AMD architectures that the tables have a row for: one, which serves every AMD GPU."""

_assumed: ContextVar[str | None] = ContextVar("assumed", default=None)


@contextlib.contextmanager
def assume_architecture(arch: str) -> Iterator[None]:
    """Have every device be of `arch` in a `with` body: tensors on the meta device then get the tiles of a GPU that is not here."""
    if arch not in NVIDIA + AMD:
        raise ValueError(f"arch must be one of {', '.join(NVIDIA + AMD)}, got {arch!r}")
    token = _assumed.set(arch)
    try:
        yield
    finally:
        _assumed.reset(token)


def architecture(device: torch.device) -> str:
    """The architecture, one of NVIDIA or AMD, whose tiles serve `device`."""
    return _assumed.get() or _architecture(device)


def nearest_architecture(major: int, minor: int) -> str:
    """The newest of NVIDIA that is no newer than compute capability `major.minor`: sm_86 for 8.9, sm_100 for 10.3."""
    older = [arch for arch in NVIDIA if int(arch.removeprefix("sm_")) <= 10 * major + minor]
    if not older:
        raise NotImplementedError(f"kernels need an NVIDIA GPU of compute capability 8.0 or later, got {major}.{minor}")
    return older[-1]


@functools.cache
def _architecture(device: torch.device) -> str:
    if torch.version.hip is not None:
        return AMD[0]
    return nearest_architecture(*torch.cuda.get_device_capability(device))
