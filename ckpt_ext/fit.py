"""What a training step takes on one device, by counted bytes, and the longest sequence or the largest batch that fits a memory.

The step is a chain: the blocks (`ckpt_ext.costs`, `ckpt_ext.stock`), put together by `ckpt_ext.plan`, then the head and its loss, the
embedding's gradient and the optimizer's step (`ckpt_ext.budget`). Its peak is the greatest of them. Each figure is of the very length and
batch; none is extrapolated. Tensors are counted: fragmentation and the CUDA context come on top (`Search.reserve`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple

from .budget import Loss, Training, adapter_parameters, head_bytes, holdings
from .costs import BlockCosts, Cost, block_bytes, offloaded, shared_bytes
from .partition import least_peak_lengths
from .plan import Plan, predict
from .shapes import ModelShape, linear_shapes
from .spec import BlockSpec, Policy
from .stock import Stock, stock_bytes
from .tracing import Bytes
from .validate import positive_int

PARTS = ("parameters", "optimizer state", "gradients", "saved between forward and backward", "block at work", "logits and loss", "other")
"""What the bytes at a step's peak are."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to run the blocks and the loss."""

    name: str
    blocks: Stock | Literal["ours"] = "ours"
    policy: Policy = Policy()
    """Of our blocks; of torch's checkpoints, only whether inputs wait in the host's memory."""
    segments: bool = False
    """Whether only the first block of a segment keeps its input; where that leaves the device, in segments of even lengths."""
    loss: Loss = "tiled"


METHODS = (
    Method("nothing checkpointed", "plain", loss="logits"),
    Method("torch checkpoint", "torch checkpoint", loss="logits"),
    Method("ours: input"),
    Method("ours: input, segments", segments=True),
    Method("ours: input, offload", policy=Policy(offload=True)),
    Method("ours: input, segments, offload", policy=Policy(offload=True), segments=True),
)
"""Those that `fit` compares; the first two with the loss of the day, whole logits."""


_TOO_MUCH = 1 << 62
"""Bytes that no memory has."""


class Estimate(NamedTuple):
    """Bytes that a training step takes."""

    parts: dict[str, int]
    """Of `PARTS`, at the moment of the peak."""
    moment: str
    """When that is."""
    host: int
    """Bytes in the host's memory."""
    segments: tuple[int, ...]
    """Lengths of the segments."""

    @property
    def peak(self) -> int:
        """On the device."""
        return sum(self.parts.values())


def estimate(
    shape: ModelShape, method: Method, training: Training, batch: int, length: int, *, host_memory: int | None = None
) -> Estimate:  # fmt: skip
    """What a step takes on a GPU. With `host_memory`, offloaded segments are as short as that lets them be; else one block long."""
    held = holdings(shape, training)
    costs = {spec: _block(spec, method, training, batch, length) for spec in set(shape.layers)}
    blocks = [costs[spec]._replace(gradients=left) for spec, left in zip(shape.layers, held.block_gradients, strict=True)]
    offload = method.policy.offload
    lengths = _lengths(blocks, method, host_memory, held.host)
    starts = {sum(lengths[:index]) for index in range(len(lengths))}
    # A rebuilt input does not wait anywhere.
    policies = [replace(method.policy, offload=offload and index in starts) for index in range(len(blocks))]
    last = shape.layers[-1]
    trained = not training.rank
    head = head_bytes(last, shape.vocab, shape.softcap, batch, length, method.loss, training.dtype, trained)
    before = held.head_gradients + sum(held.block_gradients)
    after = before + held.embedding_rest
    if training.accumulate:
        blocks = [block._replace(gradients=0) for block in blocks]
    # With accumulation the old gradients are there all the time, and each new one for a while on top.
    early, before = (after, after) if training.accumulate else (held.head_gradients, before)
    at_head = max(head.forward, head.backward) - (0 if training.accumulate else early)
    other = shared_bytes(shape.layers, length) + 16 * batch * length  # with symbols and targets
    base = {"parameters": held.parameters, "optimizer state": held.states, "other": other}
    plan = predict(blocks, policies, lengths, fixed=sum(base.values()) + early, head=at_head)
    moments = [_of_plan(plan, base, early), ("the optimizer's step", {**base, "gradients": after})]
    if trained:
        working = blocks[0].input + held.embedding_gradients
        moments.append(("the embedding's gradient", {**base, "gradients": before, "block at work": working}))
    moment, parts = max(moments, key=lambda pair: sum(pair[1].values()))
    host = held.host + (sum(blocks[index].input for index in starts) if offload else 0)
    return Estimate({part: parts.get(part, 0) for part in PARTS}, moment, host, tuple(lengths))


def _of_plan(plan: Plan, base: dict[str, int], fixed_gradients: int) -> tuple[str, dict[str, int]]:
    split = plan.split
    at_head = plan.head_peak == plan.peak
    working = "logits and loss" if at_head else "block at work"
    parts = {
        **base, "gradients": fixed_gradients + split.gradients, "saved between forward and backward": split.kept, working: split.working
    }  # fmt: skip
    if at_head:
        return "head and loss", parts
    index = next(index for index, block in enumerate(plan.blocks) if plan.peak in (block.forward_peak, block.backward_peak))
    passing = "backward" if plan.blocks[index].backward_peak == plan.peak else "forward"
    return f"{passing} of block {index}", parts


def _block(spec: BlockSpec, method: Method, training: Training, batch: int, length: int) -> BlockCosts:
    """The costs of a block under the method; no seconds."""
    dtype, rank, tokens = training.dtype, training.rank, batch * length
    size = tokens * spec.dim * dtype.itemsize
    kept = replace(method.policy, offload=False)
    extra = whole = 0
    if method.blocks != "ours":
        found = stock_bytes(spec, batch, length, method.blocks, dtype, trained=not rank, rank=rank)
    else:
        found = block_bytes(spec, batch, length, kept, dtype=dtype, trained=not rank, device="cuda")
        # Of adapters: what lies between their two matrices, and its gradients, of all layers at once, which is more than there ever are.
        extra = 2 * rank * len(linear_shapes(spec)) * tokens * dtype.itemsize
        whole = adapter_parameters(spec, rank) * dtype.itemsize
    found = Bytes(found.saved, found.forward + extra, found.backward + extra + whole)
    options = {kept: Cost(*found, 0.0)}
    if method.policy.offload:
        options[method.policy] = Cost(*offloaded(found, size), 0.0)
    return BlockCosts(size, 0, 0.0, options)


def _lengths(blocks: Sequence[BlockCosts], method: Method, host_memory: int | None, host: int) -> list[int]:
    """Lengths of the segments: of those that peak least, or where inputs leave the device, of as many as the host's memory takes."""
    if not method.segments:
        return [1] * len(blocks)
    if method.policy.offload:
        fitting = len(blocks) if host_memory is None else max(1, (host_memory - host) // blocks[0].input)
        size = -(-len(blocks) // min(fitting, len(blocks)))
        return [size] * (len(blocks) // size) + ([len(blocks) % size] if len(blocks) % size else [])
    later, working = 0, []
    for block in reversed(blocks):
        cost = block.options[method.policy]
        working.append(cost.backward - block.input + later)
        later += block.gradients
    return least_peak_lengths([block.input for block in blocks], working[::-1])


@dataclass(frozen=True, slots=True)
class Search:
    """What to look for: the longest sequence for a batch, or the largest batch for a length. Raises ValueError, naming the field."""

    batch: int = 1
    length: int | None = None
    """If given, the batch is looked for."""
    step: int = 1024
    """Lengths are multiples of it; where fewer than 16 steps fit, of a sixteenth of it."""
    reserve: float | int = 0.05
    """Left free for what is not counted: a share of the memory if below one, else bytes. The default is a guess."""
    host_memory: int | None = None
    """Bytes of the host that may be used; None is no bound."""
    most: int = 1 << 26
    """Tokens at which the search ends."""

    def __post_init__(self) -> None:
        for name in ("batch", "step", "most"):
            positive_int(name, getattr(self, name))
        for name in ("length", "host_memory"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        if not self.reserve >= 0:
            raise ValueError(f"reserve must be a share of the memory below 1 or a number of bytes, got {self.reserve}")

    def usable(self, memory: int) -> int:
        """Bytes of a memory that tensors may take."""
        return memory - int(memory * self.reserve if self.reserve < 1 else self.reserve)


class Fit(NamedTuple):
    """A cell of the table."""

    method: str
    training: Training
    memory: int
    found: int
    """Tokens of a sequence, or sequences of a batch; 0 where none fits."""
    estimate: Estimate | None
    """There, or of the least that was tried where nothing fits."""


@dataclass(frozen=True)
class Table:
    """What fits."""

    shape: ModelShape
    search: Search
    cells: list[Fit] = field(default_factory=list)


def fit(
    shape: ModelShape, memories: Sequence[int], trainings: Sequence[Training], search: Search | None = None, *,
    methods: Sequence[Method] = METHODS, progress: Callable[[str], None] = lambda phase: None,
) -> Table:  # fmt: skip
    """The longest sequence, or the largest batch, for each memory in bytes, each kind of training and each method.

    The peak that is counted for what is found, at just that size, is within the memory less the reserve, and that of one step more is not.
    """
    table = Table(shape, search or Search())
    for training in trainings:
        for method in methods:
            progress(f"{method.name}, {'adapters' if training.rank else 'all weights'}")

            @cache
            def measured(batch: int, length: int, method: Method = method, training: Training = training) -> Estimate:
                return estimate(shape, method, training, batch, length, host_memory=table.search.host_memory)

            known: dict[int, dict[int, int]] = {}
            for memory in memories:
                found, there = _find(measured, memory, table.search, known)
                table.cells.append(Fit(method.name, training, memory, found, there))
    return table


def _find(
    measured: Callable[[int, int], Estimate], memory: int, search: Search, known: dict[int, dict[int, int]]
) -> tuple[int, Estimate]:  # fmt: skip
    """What fits a memory, and the estimate there; `known` has the needs by step and count that were asked for before."""
    sizes = (1,) if search.length else tuple(dict.fromkeys((search.step, max(1, search.step // 16))))
    for size in sizes:

        def at(count: int, size: int = size) -> Estimate:
            return measured(count, search.length) if search.length else measured(search.batch, count * size)

        def need(count: int) -> int:
            there = at(count)
            over = search.host_memory is not None and there.host > search.host_memory
            return _TOO_MUCH + there.host if over else there.peak
        most = max(1, search.most // (search.length or search.batch * size))
        count = largest(need, search.usable(memory), most, known.setdefault(size, {}))
        if count >= 16:
            break
    return count * size, at(max(count, 1))


def largest(need: Callable[[int], int], limit: int, most: int, known: dict[int, int] | None = None) -> int:
    """The largest count up to `most` of which the need, which grows with it, is within the limit; 0 if none is.

    Needs are nearly straight lines, so that a line through two of them soon finds the place; both it and the next one are asked for, unless
    they are in `known`, which takes in what is asked for.
    """
    needs = {} if known is None else known

    def ask(count: int) -> int:
        if count not in needs:
            needs[count] = need(count)
        return needs[count]

    if ask(1) > limit:
        return 0
    low = max(count for count in needs if needs[count] <= limit)
    high = min((count for count in needs if count > low), default=most + 1)
    probe, asked = min(max(16, low), most), 0
    if probe <= low or probe >= high:
        probe = _between(needs, low, high, most, limit)
    while high - low > 1:
        asked += 1
        if ask(probe) <= limit:
            low = probe
        else:
            high = probe
        # Halved now and then, for where the line is none.
        probe = (low + high) // 2 if asked % 6 == 0 and high <= most else _between(needs, low, high, most, limit)
    return low


def _between(needs: Mapping[int, int], low: int, high: int, most: int, limit: int) -> int:
    """Where the limit is on a straight line: through the needs at low and high, or where none is too much, of the last two."""
    left, right = (low, high) if high <= most else (max((count for count in needs if count < low), default=low), low)
    slope = (needs[right] - needs[left]) / (right - left) if right > left else 0.0
    ahead = low + int((limit - needs[low]) / slope) if slope > 0 else 16 * low
    return min(max(ahead, low + 1), high - 1)
