"""Trains a language model on several ranks: nothing checkpointed, by `torch.utils.checkpoint`, and by this engine, side by side.

    python -m bench.train_distributed --out DIR                    # two ranks on CPUs over gloo, or one on each GPU over NCCL
    torchrun --nproc-per-node 8 -m bench.train_distributed --dim 4096 --heads 32 --kv-heads 8 --hidden-dim 14336 --length 8192
    python -m bench.train_distributed --model tiny-llama           # or a folder of Hugging Face's
    python -m bench.train_distributed --collectives --out DIR      # four ranks on CPUs, collectives alone, less than two minutes

Under DDP, FSDP2 (block by block, with and without resharding after forward; the model as a whole; HSDP), tensor parallelism and both. All
ways of a layout start from the same parameters, read the same text and take turns step by step. "torch checkpoint" is `checkpoint_wrapper`
around each layer. The peak is beyond parameters, gathered ones too, and finished gradients; on a CPU it is counted storage by storage, on a
GPU it is the allocator's, with gathered parameters in it. Collectives are those of one whole step, the same on every rank.

Exits with 1 where our collectives are others than with nothing checkpointed, or where losses differ.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench import collectives
from bench.sharding import LAYOUTS, NATIVE, NOTHING, OURS, TORCH, WAYS, Layout, loss_of, optimizer_of
from ckpt_ext import text
from ckpt_ext.memory import activation_peak

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float64: 1e-9}
"""How far our losses may be from those of nothing checkpointed, in nats: other kernels round elsewhere, AdamW carries that on."""
WARM_UP = 2
"""Steps before anything is counted: FSDP2 learns its order in the first, DDP sends the order of its buckets round after it."""
PATIENCE = timedelta(minutes=3)
"""How long a rank waits for another."""
CPU_NOTE = "Times of a CPU, over gloo, say nothing about a GPU's speed."


@dataclass(frozen=True)
class Row:
    """One way of training in one layout; without figures where `reason` says why."""

    layout: str
    way: str
    reason: str = ""
    tokens_per_s: float | None = None
    """Of all ranks together, by the median step of the slowest."""
    peak_mib: list[float] = field(default_factory=list)
    """Rank by rank."""
    collectives: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """The mean over the ranks, step by step."""


class Training:
    """One model in training on this rank."""

    def __init__(self, model: nn.Module, windows: Tensor) -> None:
        self.model, self.windows = model, windows
        self.optimizer = optimizer_of(model)
        self.buckets = collectives.Buckets(model) if isinstance(model, DistributedDataParallel) else None
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """Forward, backward, optimizer, on the next of the windows."""
        start = time.perf_counter()
        loss = self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())  # waits for a GPU
        self.seconds.append(time.perf_counter() - start)

    def peak_mib(self) -> float:
        """Of one more forward and backward pass; nothing is learned from it."""
        if self.windows.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._backward()
            torch.cuda.synchronize()
            gradients = sum(getattr(p.grad, "_local_tensor", p.grad).nbytes for p in self.model.parameters() if p.grad is not None)
            peak = torch.cuda.max_memory_allocated() - before - gradients
        else:
            peak = activation_peak(self._backward, self.model, [self.windows])
        self.optimizer.zero_grad(set_to_none=True)
        return peak / 2**20

    def _backward(self) -> Tensor:
        loss = loss_of(self.model, self.windows[len(self.losses) % len(self.windows)])
        loss.backward()
        return loss.detach()


def measure(layout: Layout, options: argparse.Namespace, done: Callable[[], object] = lambda: None) -> list[Row]:
    """All ways of one layout, on this rank and the others at once; the same on each."""
    trainings: dict[str, Training] = {}
    reasons: dict[str, str] = {}
    try:
        mesh = layout.mesh(options.device.type, dist.get_world_size())
        shares = layout.shares(mesh)
        steps = WARM_UP + 1 + options.steps
        windows = text.batches(text.read(), steps, options.batch, options.length, seed=layout.share(mesh)).to(options.device)
        for way in WAYS:
            try:
                trainings[way] = Training(layout.build(way, options, mesh), windows)
            except NotImplementedError as error:  # on every rank alike, before any of them has sent anything
                reasons[way] = str(error)
    except NotImplementedError as error:
        reasons = dict.fromkeys(WAYS, str(error))
    counts = {}
    for step in range(WARM_UP + options.steps if trainings else 0):
        for training in trainings.values():
            dist.barrier()
            training.step()
        if step + 1 == WARM_UP:
            counts = {way: collectives.count(training.step, training.buckets) for way, training in trainings.items()}
        done()
    rows = []
    for way in WAYS:
        if way not in trainings:
            rows.append(Row(layout.name, way, reasons[way]))
            continue
        training = trainings[way]
        timed = training.seconds[WARM_UP + 1 :]
        peak = [] if options.collectives else [training.peak_mib()]
        mine = (median(timed) if timed else 0.0, peak, counts[way], training.losses)
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        seconds, peaks, counted, losses = zip(*found, strict=True)
        differing = "" if all(other == counts[way] for other in counted) else f"ranks differ: {counted}"
        speed = shares * options.batch * options.length / max(seconds) if timed else None
        mean = [sum(step) / len(step) for step in zip(*losses, strict=True)]
        rows.append(Row(layout.name, way, differing, speed, sum(peaks, []), counts[way], mean))
    return rows


def judge(rows: Sequence[Row], tolerance: float, *, of_torch: float = 0.0) -> list[str]:
    """What is not as it must be. Losses of ours may be `tolerance`, torch checkpoint's `of_torch` away from those of nothing."""
    by = {(row.layout, row.way): row for row in rows}
    wrong = []
    for layout in dict.fromkeys(row.layout for row in rows):
        nothing, torchs, ours = (by[layout, way] for way in (NOTHING, TORCH, OURS))
        if not nothing.losses:
            continue
        if ours.reason or not ours.losses:
            wrong.append(f"{layout}: ours did not run as it must: {ours.reason}")
            continue
        if ours.collectives != nothing.collectives:
            told = [collectives.written(row.collectives) for row in (ours, nothing)]
            wrong.append(f"{layout}: ours has {told[0]} a step, nothing checkpointed {told[1]}")
        for row, allowed in ((torchs, of_torch), (ours, tolerance)):
            distances = [abs(a - b) for a, b in zip(row.losses, nothing.losses, strict=True)] if row.losses else []
            distance = next((d for d in distances if math.isnan(d)), max(distances, default=0.0))
            if not distance <= allowed:
                wrong.append(f"{layout}: losses of {row.way} are {distance:.1e} away from those of nothing checkpointed")
    return wrong


def speeds(rows: Sequence[Row]) -> list[list[str]]:
    """A table, its head first."""
    lines = [["layout", "way", "tokens/s", "peak MiB a rank", "collectives a step", "last loss"]]
    for row in rows:
        if not row.losses:
            lines.append([row.layout, row.way, "-", "-", row.reason, "-"])
            continue
        speed = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
        low, high = (f"{pick(row.peak_mib):.2f}" for pick in (min, max))
        peak = low if low == high else f"{low} to {high}"
        lines.append([row.layout, row.way, speed, peak, collectives.written(row.collectives), f"{row.losses[-1]:.5f}"])
    return lines


def tables(rows: Sequence[Row], options: argparse.Namespace) -> list[list[list[str]]]:
    """Of collectives alone, or of all and of collectives."""
    counts = {(row.layout, row.way): row.collectives for row in rows if row.losses}
    counted = collectives.table(dict.fromkeys(row.layout for row in rows), WAYS, counts)
    return [counted] if options.collectives else [speeds(rows), counted]


def notes(rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    """What a reader must know beside the tables."""
    found = [f"DDP calls its all-reduces from C++: they are counted in a communication hook, one a bucket of {options.bucket_mib:g} MiB."]
    if options.model == NATIVE and any("TP" in row.layout for row in rows):
        found.append("Under TP, nothing and torch checkpoint run transformers' Llama with the parameters of our model.")
    if not options.collectives and options.device.type == "cpu":
        found.append(CPU_NOTE)
    return found


def report(rows: Sequence[Row], wrong: Sequence[str], options: argparse.Namespace) -> None:
    """Show the tables and, with `--out`, write report.json and report.md."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    ranks = dist.get_world_size()
    model = f"{options.model}, {options.layers or 'all'} layers, {options.batch} x {options.length} symbols a share"
    title = f"{model}, {ranks} ranks, {options.device.type}, {str(options.dtype).removeprefix('torch.')}, torch {torch.__version__}"
    console = Console()
    if not console.is_terminal:
        console.width = 180
    shown = tables(rows, options)
    for head, *cells in shown:
        table = Table(*head, title=title, box=box.SIMPLE_HEAD)
        for row in cells:
            table.add_row(*row)
        console.print(table)
    for line in notes(rows, options):
        console.print(line)
    for line in wrong:
        console.print(f"[bold red]{line}[/]")
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) for name, value in vars(options).items() if name != "out"}
    found = {"torch": torch.__version__, "ranks": ranks, "settings": settings, "notes": notes(rows, options), "wrong": list(wrong)}
    (options.out / "report.json").write_text(json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    verdict = [f"**wrong**: {line}" for line in wrong] or ["Our collectives are those of nothing checkpointed, and losses agree."]
    parts = [f"# {title}", *map(collectives.markdown, shown), *notes(rows, options), *verdict]
    (options.out / "report.md").write_text("\n\n".join(parts) + "\n")


def on_rank(options: argparse.Namespace) -> int:
    """All layouts, in a process group that is there; the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    chosen = [layout for layout in LAYOUTS if not options.layouts or layout.name in options.layouts]
    rows: list[Row] = []
    with Progress(disable=dist.get_rank() != 0, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen) * (WARM_UP + options.steps))
        for index, layout in enumerate(chosen):
            progress.update(task, description=layout.name)
            rows += measure(layout, options, lambda: progress.advance(task))
            progress.update(task, completed=(index + 1) * (WARM_UP + options.steps))
    tolerance = LOSS_TOLERANCE[options.dtype]
    # The same operators give the same bits on a CPU; on a GPU attention's backward may add in any order.
    wrong = judge(rows, tolerance, of_torch=0.0 if options.device.type == "cpu" else tolerance)
    if dist.get_rank() == 0:
        report(rows, wrong, options)
    return 1 if wrong else 0


def joined(options: argparse.Namespace, store: dist.Store | None = None) -> int:
    """Join the other ranks, as torchrun's variables say, and run; the exit code."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = (-1, -1) if store is None else (world, rank)
    if options.device.type == "cuda":
        options.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(options.device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    backend = "nccl" if options.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE, store=store, world_size=place[0], rank=place[1])
    try:
        return on_rank(options)
    finally:
        dist.destroy_process_group()


def _spawned(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    sys.exit(joined(options, dist.FileStore(f"{folder}/store", world)))


def spawn(options: argparse.Namespace) -> int:
    """Run on as many processes as asked for; 0 where all of them end with 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.sharding", "transformers.models.llama.modeling_llama"])  # once for all
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, folder, options)
        processes = [context.Process(target=_spawned, args=(rank, *arguments), daemon=True) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()  # where one dies, the others' next collective fails
    return 0 if all(process.exitcode == 0 for process in processes) else 1


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--model", default=NATIVE, help="native, tiny-llama, ... or a folder with Hugging Face's config.json")
    parser.add_argument("--layouts", nargs="+", choices=[layout.name for layout in LAYOUTS], help="some only")
    parser.add_argument("--collectives", action="store_true", help="no times; small, on four ranks, where not told otherwise")
    parser.add_argument("--ranks", type=int, help="processes to start where torchrun has not")
    parser.add_argument("--steps", type=int, help="that are timed")
    parser.add_argument("--bucket-mib", type=float, help="of DDP")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if gpu else "cpu"))
    dtype = "bfloat16" if gpu else "float32"
    parser.add_argument("--dtype", type=DTYPES.__getitem__, default=DTYPES[dtype], metavar=f"{{{','.join(DTYPES)}}}")
    sizes = {"layers": None, "dim": 128, "heads": 8, "kv-heads": 4, "hidden-dim": 352, "batch": 2, "length": 256}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for report.json and report.md")
    options = parser.parse_args(argv)
    small = {"ranks": 4, "steps": 0, "bucket_mib": 1.0}
    usual = {"ranks": torch.cuda.device_count() if options.device.type == "cuda" else 2, "steps": 10, "bucket_mib": 25.0}
    for name, value in (small if options.collectives else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.layers is None and options.model == NATIVE:
        options.layers = 4
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    return joined(options) if "WORLD_SIZE" in os.environ else spawn(options)


if __name__ == "__main__":
    raise SystemExit(main())
