"""Collectives of a training step by kind, and what must be true of them: recomputing in backward must not talk to other ranks again.

Functional and in-place operators of one kind count alike: what a `DTensor` calls `all_reduce` is `allreduce_` in a block of ours. DDP's
reducer calls from C++, where no dispatch mode sees it; a communication hook takes its place here, one call a bucket.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from ckpt_ext.ranks import Collectives

KINDS = {
    "allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "broadcast": "broadcast",
    "alltoall": "all-to-all",
}  # fmt: skip
"""By a part of the operator's name without underscores."""


def kind_of(operator: str) -> str:
    """Of an operator's name, in `c10d` or `_c10d_functional`; a name that is none of `KINDS` stands for itself."""
    plain = operator.replace("_", "")
    return next((kind for part, kind in KINDS.items() if part in plain), operator)


class Buckets:
    """A communication hook of DDP that does what DDP does, the mean of each bucket by one all-reduce, and counts, unseen by modes."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.calls = 0
        model.register_comm_hook(None, self._reduce)

    def _reduce(self, _: object, bucket: dist.GradBucket):
        self.calls += 1
        with _disable_current_modes():
            return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def count(step: Callable[[], object], buckets: Buckets | None = None) -> dict[str, int]:
    """Collectives in `step()` by kind, with the all-reduces of `buckets`, where DDP has some."""
    before = buckets.calls if buckets else 0
    with Collectives() as collectives:
        step()
    found: Counter[str] = Counter()
    for operator, calls in collectives.counts.items():
        found[kind_of(operator)] += calls
    if buckets:
        found["all-reduce"] += buckets.calls - before
    return dict(sorted(found.items()))


def written(counts: Mapping[str, int]) -> str:
    """`counts` in a cell of a table."""
    return ", ".join(f"{calls} {kind}" for kind, calls in counts.items()) or "none"


def table(layouts: Iterable[str], ways: Iterable[str], counts: Mapping[tuple[str, str], Mapping[str, int]]) -> list[list[str]]:
    """A row for each layout with figures, a column for each way, below a head."""
    ways = list(ways)
    rows = [["collectives a step", *ways]]
    for layout in layouts:
        cells = [counts.get((layout, way)) for way in ways]
        if any(cell is not None for cell in cells):
            rows.append([layout, *("-" if cell is None else written(cell) for cell in cells)])
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Rows of cells, the head first, as a table."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
