"""Compile kernels ahead of time for GPUs that are not here, and read what the binaries need: registers, spills, shared memory.

    python -m bench.aot --arch sm_80 sm_90 --match attention

A launcher runs on meta tensors; each kernel it would have started is compiled by `kernel.warmup`, hence with the specialisation that the
real launch would get. The command fails where a kernel spills or asks for more shared memory than the architecture has.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ckpt_ext.kernels.activation import activation_backward, activation_forward
from ckpt_ext.kernels.attention_backward import attention_backward
from ckpt_ext.kernels.attention_forward import attention_forward
from ckpt_ext.kernels.launch import INTERPRETED, Launch, record_launches
from ckpt_ext.kernels.norm import norm_backward, norm_forward
from ckpt_ext.kernels.residual import dropout as drop
from ckpt_ext.kernels.residual import dropout_add
from ckpt_ext.kernels.rope import rotate
from ckpt_ext.rng import Dropout

KIB = 1024
SHARED_LIMIT = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
"""Bytes of shared memory that one program may have, by architecture."""


@dataclass(frozen=True, slots=True)
class Binary:
    """What a compiled kernel needs of a multiprocessor; `spill` is bytes of stack a thread, `mma` counts matrix instructions."""

    kernel: str
    arch: str
    registers: int
    spill: int
    shared: int
    mma: int


def record(call: Callable[[], object]) -> list[Launch]:
    """The launches that `call()` would have made."""
    with record_launches() as launches:
        call()
    return launches


def compile_launch(launch: Launch, arch: str) -> Binary:
    """Compile the kernel of `launch` for `arch` (a key of SHARED_LIMIT), specialised as its arguments ask."""
    if INTERPRETED:
        raise RuntimeError("ahead-of-time compilation needs a process without TRITON_INTERPRET")
    driver.set_active(_AbsentGPU(arch))
    compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.constexprs)
    read = _read_amd if arch.startswith("gfx") else _read_nvidia
    return Binary(launch.kernel.__name__, arch, shared=compiled.metadata.shared, **read(compiled.asm))


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


def _read_nvidia(asm: dict) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    mma = len(re.findall(r"^\s*(?:@\S+ )?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", asm["ptx"], re.MULTILINE))
    return {"registers": int(registers), "spill": int(stack), "mma": mma}


def _read_amd(asm: dict) -> dict[str, int]:
    text = asm["amdgcn"]
    registers, spilled = (int(re.search(rf"\.{key}:\s+(\d+)", text).group(1)) for key in ("vgpr_count", "vgpr_spill_count"))
    return {"registers": registers, "spill": 4 * spilled, "mma": len(re.findall(r"v_mfma", text))}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of a shape and a dtype, without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


DROPOUT = Dropout(meta(2, dtype=torch.int64), p=0.1, site=1)


def attention_calls(head_dim: int, dtype: torch.dtype = torch.bfloat16, causal: bool = True, dropout=None) -> Callable[[], object]:
    """Forward and backward of a grouped-query attention."""
    q, kv = meta(2, 4096, 32, head_dim, dtype=dtype).transpose(1, 2), meta(2, 4096, 8, head_dim, dtype=dtype).transpose(1, 2)
    options = {"causal": causal, "scale": head_dim**-0.5, "dropout": dropout}

    def call():
        out, lse = attention_forward(q, kv, kv, **options)
        attention_backward(out, q, kv, kv, out, lse, **options)

    return call


def norm_calls(kind: str, cols: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """Forward and backward of a norm, with a bias where it is a layer norm."""
    x, weight = meta(2, 4096, cols, dtype=dtype), meta(cols, dtype=dtype)
    bias = weight if kind == "layer" else None

    def call():
        y, stats = norm_forward(x, weight, bias, kind=kind, eps=1e-5)
        norm_backward(y, x, weight, bias, stats, kind=kind, params=True)

    return call


def rope_calls(head_dim: int, rope_dim: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """A rotary embedding and its gradient, angles in float32."""
    x, angle = meta(2, 4096, 32, head_dim, dtype=dtype).transpose(1, 2), meta(4096, rope_dim // 2, dtype=torch.float32)

    def call():
        rotate(x, angle, angle)
        rotate(x, angle, angle, inverse=True)

    return call


def activation_calls(
    pointwise: str, gated: bool = True, dropout=None, dtype: torch.dtype = torch.bfloat16, hidden_dim: int = 14336
) -> Callable[[], object]:
    """Forward and backward of an MLP's elementwise middle."""
    up = meta(8192, hidden_dim, dtype=dtype)
    gate = up if gated else None

    def call():
        activation_forward(gate, up, pointwise=pointwise, dropout=dropout)
        activation_backward(up, gate, up, pointwise=pointwise, dropout=dropout)

    return call


def residual_calls(dropout=None, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """A sum with the residual stream, and where there is dropout, dropout alone."""
    x = meta(2, 4096, 4096, dtype=dtype)

    def call():
        dropout_add(x, x, dropout)
        if dropout is not None:
            drop(x, dropout)

    return call


CALLS: dict[str, Callable[[], object]] = {
    "attention d64": attention_calls(64),
    "attention d64 dropout": attention_calls(64, dropout=DROPOUT),
    "attention d64 bidirectional": attention_calls(64, causal=False),
    "attention d80": attention_calls(80),
    "attention d128": attention_calls(128),
    "attention d128 dropout": attention_calls(128, dropout=DROPOUT),
    "attention d256": attention_calls(256),
    "attention d256 dropout": attention_calls(256, dropout=DROPOUT),
    "attention d64 float32": attention_calls(64, dtype=torch.float32),
    "attention d128 float32": attention_calls(128, dtype=torch.float32),
    "attention d64 float64": attention_calls(64, dtype=torch.float64),
    "rms norm 128": norm_calls("rms", 128),
    "rms norm 4096": norm_calls("rms", 4096),
    "rms norm 8192": norm_calls("rms", 8192),
    "rms norm 16384": norm_calls("rms", 16384),
    "rms norm 65536": norm_calls("rms", 65536),
    "rms norm 4096 float32": norm_calls("rms", 4096, torch.float32),
    "layer norm 768": norm_calls("layer", 768),
    "layer norm 4096": norm_calls("layer", 4096),
    "layer norm 8192": norm_calls("layer", 8192),
    "layer norm 16384": norm_calls("layer", 16384),
    "layer norm 8192 float32": norm_calls("layer", 8192, torch.float32),
    "rope d128": rope_calls(128, 128),
    "rope d80 of 96": rope_calls(96, 80),
    "rope d128 float32": rope_calls(128, 128, torch.float32),
    "swiglu": activation_calls("silu"),
    "swiglu dropout": activation_calls("silu", dropout=DROPOUT),
    "swiglu float32": activation_calls("silu", dtype=torch.float32),
    "geglu dropout": activation_calls("gelu", dropout=DROPOUT),
    "geglu_tanh dropout": activation_calls("gelu_tanh", dropout=DROPOUT),
    "gelu": activation_calls("gelu", gated=False),
    "gelu_tanh dropout float32": activation_calls("gelu_tanh", gated=False, dropout=DROPOUT, dtype=torch.float32),
    "relu": activation_calls("relu", gated=False),
    "relu2 dropout": activation_calls("relu2", gated=False, dropout=DROPOUT),
    "residual": residual_calls(),
    "residual dropout": residual_calls(DROPOUT),
    "residual dropout float32": residual_calls(DROPOUT, torch.float32),
}
"""What to compile, by name: any call of launchers. One line each."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"], choices=list(SHARED_LIMIT))
    parser.add_argument("--match", default="", help="compile only the calls whose name has this regular expression")
    args = parser.parse_args(argv)
    failed = False
    print(f"{'call':<30} {'kernel':<32} {'arch':<8} {'registers':>9} {'spill':>6} {'shared':>8} {'mma':>5}")
    for name, call in CALLS.items():
        if not re.search(args.match, name):
            continue
        for arch in args.arch:
            for launch in record(call):
                binary = compile_launch(launch, arch)
                fits = binary.spill == 0 and binary.shared <= SHARED_LIMIT[arch]
                failed |= not fits
                row = f"{name:<30} {binary.kernel:<32} {arch:<8} {binary.registers:>9} {binary.spill:>6} {binary.shared:>8} {binary.mma:>5}"
                print(row if fits else f"{row}  <-- does not fit", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
