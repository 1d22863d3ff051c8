"""Compile every kernel ahead of time for GPUs that are not here, and read what the binaries need: registers, spills, shared memory.

    python -m bench.aot --arch sm_80 sm_90 --match attention --out bench/results/aot

A launcher runs on meta tensors; each kernel it would have started is compiled by `kernel.warmup`, hence with the specialisation that the
real launch would get. The command fails where a kernel of two-byte elements spills or multiplies matrices elsewhere than on matrix units,
where one asks for more shared memory than the architecture has, or computes a pointer's offset in 32 bits. Nothing here is measured on a
GPU.
"""

import argparse
import itertools
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from bench.aot_report import HEADER, line, write
from bench.binaries import Binary, read_launch
from bench.calls import CALLS
from bench.competitors import COMPETITORS, record_started
from bench.roofline import CARDS, bound, occupancy, traffic
from ckpt_ext.kernels.launch import Launch, record_launches

CACHE = Path(__file__).parent.parent / "build/aot"

TOLERATED = {"attention d256 float64"}
"""Calls whose faults are printed but not held against us: no smaller tile exists, as `kernels/tiles.py` says."""


def faults(binary: Binary, itemsize: int) -> list[str]:
    """What makes a default tile unfit."""
    card = CARDS[binary.arch]
    found = {
        "spills": itemsize == 2 and (binary.spill or binary.local),
        "more shared memory than there is": binary.shared > card.program_shared,
        "no matrix instructions": binary.multiplies and itemsize == 2 and not binary.matrix,
        f"32-bit offsets ({', '.join(binary.narrow_offsets)})": binary.narrow_offsets,
    }
    return [fault for fault, is_so in found.items() if is_so]


def row(name: str, itemsize: int, operations: float, launch: Launch, binary: Binary) -> dict:
    """All that is known of a launch, as it goes into the report."""
    programs, limit = occupancy(binary)
    moved = traffic(launch)
    microseconds, bound_by = bound(binary.arch, moved, operations, itemsize)
    tile = [launch.constexprs.get(key) for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages")]
    return {
        "call": name, **asdict(binary), "tile": tile, "programs": programs, "limit": limit, "resident_warps": programs * binary.warps,
        "bytes": moved, "operations": operations, "bound_us": microseconds, "bound_by": bound_by,
    }  # fmt: skip


def rows(name: str, arch: str, cache: Path) -> list[dict]:
    """The report's rows of one call on one architecture."""
    ours = name in CALLS
    call = CALLS[name] if ours else COMPETITORS[name]
    with record_launches(arch) if ours else record_started() as launches:
        call.run()
    made = []
    for launch in launches:
        binary = read_launch(launch, arch, cache)
        kept = row(name, call.dtype.itemsize, call.operations.get(binary.kernel, 0.0), launch, binary)
        made.append(kept | {"ours": ours, "faults": faults(binary, call.dtype.itemsize) if ours else []})
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(CARDS), choices=list(CARDS), help="architectures to compile for")
    parser.add_argument("--match", default="", help="compile only the calls whose name has this regular expression")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of readings, by which a run that was cut short goes on")
    parser.add_argument("--out", type=Path, help="folder for report.json and report.md")
    args = parser.parse_args(argv)
    names = [name for name in [*CALLS, *COMPETITORS] if re.search(args.match, name)]
    work = [(name, arch) for name in names for arch in args.arch]
    print(HEADER)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(rows, name, arch, args.cache) for name, arch in work]
        for future in as_completed(futures):
            print("\n".join(map(line, future.result())), flush=True)
    table: list[dict] = []
    for kept in itertools.chain.from_iterable(future.result() for future in futures):
        if all(kept | {"call": seen["call"]} != seen for seen in table):  # once, where calls share a kernel
            table.append(kept)
    failed = sum(bool(kept["faults"]) and kept["call"] not in TOLERATED for kept in table)
    print(f"{len(table)} binaries, {failed} unfit")
    if args.out:
        write(args.out, table, " ".join(["python -m bench.aot", *(sys.argv[1:] if argv is None else argv)]))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
