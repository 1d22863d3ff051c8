"""What of ckpt_ext works on this machine: versions, extension, backends, tools. `examine` looks, and raises nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from . import extension

SUPPORTED = {"python": ((3, 10), (3, 15)), "torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 10))}
"""Versions from the first on, below the second; the same as in pyproject.toml."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `ok` is None where there is nothing to be had here and nothing is wrong, such as a GPU on a machine without."""

    name: str
    ok: bool | None
    detail: str
    required: bool
    """Whether nothing works without it."""


def examine() -> list[Check]:
    """All findings on this machine, versions first."""
    return [
        _version("python", platform.python_version(), required=True),
        _version("torch", torch.__version__, required=True),
        _triton(),
        _extension(),
        Check("backend aten", True, "runs on every device", required=True),
        _triton_backend(),
        _gpu(),
        _nvcc(),
        _compiler(),
    ]


def healthy(checks: Iterable[Check]) -> bool:
    """Whether everything required is there; what is only slower or missing does not count."""
    return all(check.ok is not False for check in checks if check.required)


def _version(name: str, version: str, *, required: bool) -> Check:
    low, high = SUPPORTED[name]
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    span = f"{'.'.join(map(str, low))} to below {'.'.join(map(str, high))}"
    return Check(name, low <= numbers < high, f"{version}; supported: {span}", required)


def _triton() -> Check:
    shadow = _shadow()
    if shadow is not None:
        return Check("triton", False, f"`import triton` finds {shadow}, which is not Triton; rename or move that file", required=False)
    version = _installed("triton")
    if version is None:
        return Check("triton", None, "not installed; the aten backend is used", required=False)
    return _version("triton", version, required=False)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _shadow() -> Path | None:
    """A file that `import triton` would take in place of the package, which is a folder."""
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
        return None
    return Path(spec.origin)


def _extension() -> Check:
    status = extension.status()
    parts = "with its CUDA part" if status.cuda else "without its CUDA part"
    return Check("extension", status.loaded, f"{status.reason}, {parts}" if status.loaded else status.reason, required=False)


def _triton_backend() -> Check:
    name = "backend triton"
    if _triton().ok is not True:
        return Check(name, None, "needs a supported triton", required=False)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Check(name, True, "runs on the CPU under the interpreter (TRITON_INTERPRET=1), for tests", required=False)
    if not torch.cuda.is_available():
        return Check(name, None, "needs a GPU, or TRITON_INTERPRET=1", required=False)
    if _find_compiler() is None:
        return Check(name, False, "needs a C compiler at run time: set CC, or put cc on the PATH", required=False)
    return Check(name, True, "runs on the GPU", required=False)


def _gpu() -> Check:
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"
        return Check("gpu", None, f"none that torch can use; torch is built for {built}", required=False)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("gpu", True, ", ".join(names), required=False)


def _nvcc() -> Check:
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if path is None:
        return Check("nvcc", None, "not found; only the CUDA part of the extension needs it", required=False)
    release = re.search(r"release (\d+)\.(\d+)", _output([path, "--version"]))
    if release is None:
        return Check("nvcc", False, f"{path} does not say its release", required=False)
    found = f"{path}, release {release[1]}.{release[2]}"
    if torch.version.cuda is None:
        return Check("nvcc", None, f"{found}; this torch has no CUDA", required=False)
    fits = torch.version.cuda.split(".")[0] == release[1]
    return Check("nvcc", fits, found if fits else f"{found}, but torch is built for CUDA {torch.version.cuda}", required=False)


def _compiler() -> Check:
    path = _find_compiler()
    if path is None:
        return Check("compiler", None, "no C++ compiler on the PATH; only building the extension needs it", required=False)
    version = _output([path, "--version"]).partition("\n")[0]
    return Check("compiler", True, f"{path}: {version}", required=False)


def _find_compiler() -> str | None:
    named = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in named if name and (path := shutil.which(name))), None)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
