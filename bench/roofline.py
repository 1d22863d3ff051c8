"""What a card allows: how many programs of a binary fit on a multiprocessor, and the least time that a launch can take.

Both are computed from published figures, not measured. Time is bound by memory, each tensor of the launch read or written once at the
datasheet's bandwidth, or by arithmetic, the operations of the matrix products at the datasheet's dense peak; no kernel reaches either.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.binaries import Binary
from ckpt_ext.kernels.launch import Launch

KIB = 1024


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: limits of a program and of a multiprocessor, peak bandwidth in bytes and peak operations by element size, a second.

    `quarter` is the registers of one of a multiprocessor's four partitions, each a lane wide, of which a warp takes `step` at a time.
    """

    name: str
    multiprocessors: int
    program_shared: int
    shared: int
    reserved: int
    warps: int
    programs: int
    quarter: int
    step: int
    bandwidth: float
    peak: dict[int, float]


# Limits: CUDA C++ Programming Guide, "Compute Capabilities", and CUDA Occupancy Calculator (a program takes 1 KiB of shared memory for the
# system, a warp its registers in steps of 8 a lane); AMD "MI300 ISA" and "Instinct MI300X workload optimization" (512 vector registers a
# lane and 8 warps of 64 lanes for each of 4 units, 64 KiB of shared memory). Peaks: NVIDIA A100, H100 and HGX B200 datasheets, GA102 and
# RTX Blackwell whitepapers, AMD MI300X datasheet. Products of 2 bytes run on matrix units, without sparsity, summed in float32; those
# of 4 bytes, being no TF32, on the ordinary units of NVIDIA's cards; those of 8 bytes on matrix units where a card has them.
CARDS = {
    "sm_80": Card("A100 SXM 80 GB", 108, 163 * KIB, 164 * KIB, KIB, 64, 32, 512, 8, 2.039e12, {2: 312e12, 4: 19.5e12, 8: 19.5e12}),
    "sm_86": Card("RTX 3090", 82, 99 * KIB, 100 * KIB, KIB, 48, 16, 512, 8, 0.936e12, {2: 71e12, 4: 35.6e12, 8: 0.556e12}),
    "sm_90": Card("H100 SXM", 132, 227 * KIB, 228 * KIB, KIB, 64, 32, 512, 8, 3.35e12, {2: 989e12, 4: 67e12, 8: 67e12}),
    "sm_100": Card("B200", 148, 227 * KIB, 228 * KIB, KIB, 64, 32, 512, 8, 8.0e12, {2: 2250e12, 4: 75e12, 8: 37e12}),
    "sm_120": Card("RTX 5090", 170, 99 * KIB, 100 * KIB, KIB, 48, 24, 512, 8, 1.792e12, {2: 209.5e12, 4: 104.8e12, 8: 1.64e12}),
    "gfx942": Card("MI300X", 304, 64 * KIB, 64 * KIB, 0, 32, 32, 512, 8, 5.3e12, {2: 1307e12, 4: 163.4e12, 8: 163.4e12}),
}
"""The card by which each architecture is judged."""

TENSOR_MEMORY_COLUMNS = 512


def occupancy(binary: Binary) -> tuple[int, str]:
    """Programs of `binary` that a multiprocessor holds at once, and what limits them."""
    card = CARDS[binary.arch]
    registers = -(-max(binary.registers, card.step) // card.step) * card.step
    limits = {
        "registers": card.quarter // registers * 4 // binary.warps,
        "shared": card.shared // (binary.shared + card.reserved) if binary.shared + card.reserved else card.programs,
        "warps": card.warps // binary.warps,
        "programs": card.programs,
    }
    if binary.tensor_memory:
        limits["tensor memory"] = TENSOR_MEMORY_COLUMNS // binary.tensor_memory
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def _tensors(args: tuple) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)


def traffic(launch: Launch) -> int:
    """Bytes of the tensors of a launch, each counted once, and what is broadcast as it lies in memory."""
    tensors = {id(tensor): tensor for tensor in _tensors(launch.args)}
    return sum(min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()) for tensor in tensors.values())


def bound(arch: str, moved: int, operations: float, itemsize: int) -> tuple[float, str]:
    """The least microseconds on the card of `arch`, and whether memory or arithmetic asks for them."""
    card = CARDS[arch]
    memory, arithmetic = moved / card.bandwidth, operations / card.peak[itemsize]
    return max(memory, arithmetic) * 1e6, "memory" if memory >= arithmetic else "arithmetic"
