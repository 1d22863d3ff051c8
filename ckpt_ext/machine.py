"""Where figures were measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe(device: torch.device) -> dict[str, str | int]:
    """What a reader must know about the machine to judge a figure that was measured on `device`."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def cpu_model() -> str:
    """The processor's name as the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
