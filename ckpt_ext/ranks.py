"""For tests of distributed training: functions run on several processes joined by gloo, and a count of the collectives of a step.

One spawn, a few seconds, runs many functions.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_PATIENCE = timedelta(seconds=30)
"""How long a rank waits for another in one collective."""


class Collectives(TorchDispatchMode):
    """Counts the operators that reach other ranks while it is on, by name: `counts["_allgather_base_"]`.

    FSDP2's are seen, and those of DTensors; DDP's reducer calls its own from C++, which no mode sees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and not any(word in func.__name__ for word in ("wait", "wrap")):
            self.counts[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def run_on_ranks(cases: Sequence[Callable[[int], None]], *, world: int = 2, limit: float = 300.0) -> dict[str, str]:
    """Run each of `cases`, functions of the rank at the top level of one file, on `world` processes with one thread each.

    Every case has a process group of its own, so that one that fails leaves the next ones alone. Returns by name what went wrong, rank by
    rank with tracebacks, or "" where nothing did. A rank that dies, or is not done after `limit` seconds, fails the case it was in and
    those that it has not run.
    """
    names = [case.__name__ for case in cases]
    (file,) = {case.__code__.co_filename for case in cases}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_run_rank, args=(rank, world, file, names, folder), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        end = time.monotonic() + limit
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        found = [_read(Path(folder) / f"{rank}.jsonl") for rank in range(world)]
        for rank, process in enumerate(processes):
            for name in names:
                found[rank].setdefault(name, f"not finished: the process ended with exit code {process.exitcode}")
    return {name: "\n".join(f"rank {rank}: {by[name]}" for rank, by in enumerate(found) if by[name]) for name in names}


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def _run_rank(rank: int, world: int, file: str, names: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    # By its path: test files are no modules that a new process could import by name.
    spec = importlib.util.spec_from_file_location("ckpt_ext_ranks_cases", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with (Path(folder) / f"{rank}.jsonl").open("a") as log:
        for name in names:
            log.write(json.dumps([name, _outcome(getattr(module, name), rank, world, f"{folder}/{name}")]) + "\n")
            log.flush()


def _outcome(case: Callable[[int], None], rank: int, world: int, store: str) -> str:
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=_PATIENCE)
        case(rank)
        dist.barrier()
        return ""
    except Exception:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
