"""How long a run takes and how much memory it needs, by the means of each device; what the machine is, and what it can do at most."""

import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt_ext import extension, machine
from ckpt_ext.backends import interpreting
from ckpt_ext.memory import LiveStorages


class Work(NamedTuple):
    """What a provider has prepared. A run is `run(before())`, of which `run` alone is timed; it returns its results by name."""

    run: Callable[[Any], dict[str, Tensor]]
    before: Callable[[], Any] = lambda: None
    forward: Callable[[], object] | None = None
    """Its forward pass alone: what autograd keeps of it, but for storages of `ignored`, is what the provider saves."""
    ignored: Sequence[Tensor] = ()


HEAD_START_CYCLES = 1_000_000
"""About half a millisecond in which a GPU idles while the host enqueues the run; without it, launches of short kernels are timed."""


def clock_for(device: torch.device) -> Callable[[Work], float]:
    """A function from a piece of work to the seconds of one run of it."""
    return _GpuClock(device) if device.type == "cuda" else _cpu_seconds


def _cpu_seconds(work: Work) -> float:
    state = work.before()
    start = time.perf_counter()
    work.run(state)
    return time.perf_counter() - start


class _GpuClock:
    """Events around a run that finds nothing of its inputs in the second-level cache."""

    def __init__(self, device: torch.device):
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache, dtype=torch.int8, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, work: Work) -> float:
        state = work.before()
        self._flush.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        self._start.record()
        work.run(state)
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


def rehearse(work: Work, device: torch.device, timer: Callable[[Work], float]) -> tuple[int, float]:
    """The most that was alive in a run, with its results, beyond what was alive before it; and how long it took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds = timer(work)
        return torch.cuda.max_memory_allocated(device) - before, seconds
    with LiveStorages() as memory:
        seconds = timer(work)
    return memory.peak, seconds


def ceilings(device: torch.device) -> dict[str, float]:
    """The rates of a large copy (bytes read and written) and of a large matrix product, measured now."""
    gpu = device.type == "cuda"
    elements, width = (2**30, 8192) if gpu else (2**22, 512)
    dtype = torch.bfloat16 if gpu else torch.float32
    source = torch.randint(2**8, (elements,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    seconds = _median(lambda: target.copy_(source), device)
    product_seconds = _median(lambda: torch.mm(a, b), device)
    return {"gb_per_s": 2 * elements / seconds / 1e9, "tflops": 2 * width**3 / product_seconds / 1e12}


def _median(call: Callable[[], Tensor], device: torch.device) -> float:
    timer, work = clock_for(device), Work(lambda state: {"": call()})
    return statistics.median([timer(work) for _ in range(13)][3:])


def header(device: torch.device) -> dict[str, str | int]:
    """What a reader must know about where and with what figures were measured."""
    found: dict[str, str | int] = machine.describe(device)
    found["python"] = platform.python_version()
    for name in ("triton", "liger_kernel", "transformers"):
        found[name] = _version(name)
    status = extension.status()
    found["ckpt_ext"] = _version("ckpt_ext")
    found["extension"] = status.reason + (", CUDA part" if status.cuda else "")
    found["commit"] = _commit()
    found["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if interpreting():
        found["interpreter"] = "on"
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda or "", **_driver(device)}
    return found


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "from a checkout" if distribution == "ckpt_ext" else "not installed"


def _commit() -> str:
    """The checkout's commit, marked where files differ from it; "unknown" outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _driver(device: torch.device) -> dict[str, str]:
    """Driver and clocks as nvidia-smi tells them; nothing is set."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, map(str.strip, shown.split(",")), strict=False))
