"""Kernels compiled for GPUs that need not be here, and what their binaries need; readings are kept in a folder between runs."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bench import instructions, offsets
from ckpt_ext.kernels.launch import INTERPRETED, Launch


@dataclass(frozen=True, slots=True)
class Binary:
    """What a compiled kernel needs of a multiprocessor, and the instructions it is made of.

    `registers` and `spill` (bytes of stack) are a thread's, `shared` (bytes) and `tensor_memory` (columns) a program's. `local` counts
    instructions on the stack, `matrix` those on matrix units, `wide_loads` and `wide_stores` those of 16 bytes a thread to or from memory.
    """

    kernel: str
    arch: str
    warps: int
    registers: int
    spill: int
    local: int
    shared: int
    tensor_memory: int
    matrix: int
    loads: int
    wide_loads: int
    stores: int
    wide_stores: int
    multiplies: bool
    narrow_offsets: tuple[str, ...]


def compile_launch(launch: Launch, arch: str) -> Binary:
    """Compile the kernel of `launch` for `arch`, specialised as its arguments ask."""
    if INTERPRETED:
        raise RuntimeError("ahead-of-time compilation needs a process without TRITON_INTERPRET")
    driver.set_active(_AbsentGPU(arch))
    compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.constexprs)
    asm, metadata = compiled.asm, compiled.metadata
    figures = instructions.read_amd(asm["amdgcn"]) if arch.startswith("gfx") else instructions.read_nvidia(asm["cubin"])
    return Binary(
        kernel=launch.kernel.__name__,
        arch=arch,
        warps=metadata.num_warps,
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", None) or 0,
        multiplies="tt.dot" in asm["ttir"],
        narrow_offsets=tuple(offsets.narrow_offsets(asm["ttir"])),
        **figures,
    )


def read_launch(launch: Launch, arch: str, folder: Path) -> Binary:
    """`compile_launch`, but for readings that `folder` has already: a run that was cut short goes on where it stopped."""
    path = folder / f"{_key(launch, arch)}.json"
    if path.exists():
        kept = json.loads(path.read_text())
        return Binary(**kept | {"narrow_offsets": tuple(kept["narrow_offsets"])})
    binary = compile_launch(launch, arch)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(binary)))
    unfinished.replace(path)
    return binary


def _key(launch: Launch, arch: str) -> str:
    """What a reading depends on: the kernel's source and all it calls, its arguments, the target, Triton, and how binaries are read."""
    args = [_describe(arg) for arg in launch.args]
    constexprs = {name: _describe(value) for name, value in sorted(launch.constexprs.items())}
    parts = launch.kernel.cache_key, args, constexprs, arch, triton.__version__, _readers()
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _describe(arg) -> str:
    if isinstance(arg, tuple):
        return str([_describe(part) for part in arg])
    return f"{arg.dtype} {arg.data_ptr() % 16}" if isinstance(arg, torch.Tensor) else str(arg)


@cache
def _readers() -> str:
    sources = (Path(file).read_bytes() for file in (__file__, instructions.__file__, offsets.__file__))
    return hashlib.sha256(b"".join(sources)).hexdigest()


class _AbsentGPU:
    """As much of a Triton driver as compiling asks for: which target to compile for."""

    def __init__(self, arch: str):
        if arch.startswith("gfx"):
            self.target = GPUTarget("hip", arch, 64)
        else:
            self.target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)

    def get_current_device(self) -> str:
        return str(self.target.arch)  # a kernel keeps its binaries by device, so each architecture counts as one

    def get_current_stream(self, device) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target
