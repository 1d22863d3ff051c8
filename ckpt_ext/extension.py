"""The C++ extension `ckpt_ext._C`: found, checked against the running torch, and loaded once.

A library built for another torch may crash the process as it loads, so the versions are read out of the file first.
"""

import importlib
import mmap
import re
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

BUILD = "pip install --no-build-isolation -e ."
"""How to build the extension, from a checkout with torch installed."""

MARKER = re.compile(rb"ckpt_ext built for torch=([\d.]+) cuda=([\w.]+);")
"""What csrc/module.cpp compiles into the library."""


@dataclass(frozen=True, slots=True)
class Status:
    """Whether the extension is in use, and if not why, with the way out."""

    loaded: bool
    reason: str
    built_for: str | None = None
    """The torch version that it was built for; None where there is no library."""
    cuda: bool = False
    """Whether it has the CUDA part."""


class Marker(NamedTuple):
    """What a library says of itself: the torch release it was built for, and the CUDA release or "none"."""

    torch: str
    cuda: str


def read_marker(path: Path) -> Marker | None:
    """The marker in the file at `path`, which is not loaded; None where there is none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = MARKER.search(content)
        return found and Marker(found[1].decode(), found[2].decode())


def examine(folder: Path) -> Status:
    """What can be said of the library in `folder` without loading it; `loaded` is False, `reason` empty where nothing speaks against it."""
    paths = [path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_C{suffix}").exists()]
    if not paths:
        others = ", ".join(path.name for path in sorted(folder.glob("_C*.so")))
        found = f"only has {others}, built for another Python" if others else "is not built"
        return Status(False, f"the C++ extension of ckpt_ext {found}; build it with `{BUILD}`")
    marker = read_marker(paths[0]) if paths[0].stat().st_size else None
    if marker is None:
        return Status(False, f"{paths[0].name} is no C++ extension of this ckpt_ext; build it again with `{BUILD}`")
    running = torch.__version__
    reason = ""
    if marker.torch != release(running):
        versions = f"was built for torch {marker.torch}, but torch {running} runs"
        reason = f"the C++ extension of ckpt_ext {versions}; build it again with `{BUILD}`"
    return Status(False, reason, marker.torch, marker.cuda != "none")


def release(version: str) -> str:
    """The numbers of a version: "2.13.0" of "2.13.0+cpu", "2.14.0" of "2.14.0a0+git1234567"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return numbers[0] if numbers else version


@cache
def _load() -> tuple[Status, ModuleType | None]:
    found = examine(Path(__file__).parent)
    if found.reason:
        return found, None
    try:
        module = importlib.import_module("._C", __package__)
    except Exception as error:  # whatever the loader says, the package works without the extension
        reason = f"the C++ extension of ckpt_ext did not load ({error}); build it again with `{BUILD}`"
        return Status(False, reason, found.built_for, found.cuda), None
    return Status(True, f"built for torch {found.built_for}", found.built_for, found.cuda), module


def status() -> Status:
    """Whether the extension is in use. Loads it when first called; never raises."""
    return _load()[0]


def module() -> ModuleType | None:
    """The extension, or None where `status()` says that it is not loaded."""
    return _load()[1]
