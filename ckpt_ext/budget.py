"""What a training run holds beside its blocks' activations: parameters, gradients, optimizer state, the head and its loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from . import cross_entropy, functional, stock
from .shapes import ModelShape, linear_shapes
from .slicing import spans
from .spec import BlockSpec
from .tracing import Bytes, trace
from .validate import one_of, positive_int
from .weights import NormWeights

Optimizer = Literal["adamw", "adamw-fp32", "adamw-8bit", "adafactor", "offloaded", "none"]
Loss = Literal["logits", "tiled"]

_UNITS = {"": 1, **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}} | {
    f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)
}


def parse_bytes(text: str) -> int:
    """Bytes of a size as people write it: "24GB" is 24e9, "24GiB" is 24 * 2**30, "123" is 123; case and spaces do not matter.

    Raises ValueError for anything else, and for what is no positive number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or int(float(match[1]) * _UNITS[match[2]]) < 1:
        raise ValueError(f"a size must be a positive number and a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(size: int) -> str:
    """A size in decimal units, as vendors name memories: "24.0 GB"."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained, as far as that decides what is held beside activations.

    Raises ValueError for a value out of range, naming the field.
    """

    optimizer: Optimizer = "adamw"
    """Whose state is held, per trained parameter. "adamw": two moments in the parameters' dtype. "adamw-fp32": two moments and a copy of
    the parameter in float32, 12 bytes. "adamw-8bit": two moments of a byte each, and 8 bytes for 256 elements (arXiv:2110.02861).
    "adafactor": a sum for each row and column in float32, no momentum (arXiv:1804.04235). "offloaded": as "adamw-fp32" in the host's
    memory, where each gradient goes as soon as it is there. "none": nothing. Steps are taken in place, as fused optimizers do."""
    rank: int = 0
    """Of adapters on all of a block's linear layers (arXiv:2106.09685), the only parameters trained then; 0 trains all of the model."""
    shards: int = 1
    """Devices that parameters, gradients and state are divided among; what is at work is gathered: two blocks (one ahead), or a matrix."""
    offload_weights: bool = False
    """Whether parameters wait in the host's memory, with as much on the device as is gathered of sharded ones."""
    accumulate: bool = False
    """Whether a step has several backward passes, so that gradients are there from the start."""
    dtype: torch.dtype = torch.bfloat16
    """Of parameters, adapters, gradients and activations."""

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, get_args(Optimizer))
        if self.rank != 0:
            positive_int("rank", self.rank)
        positive_int("shards", self.shards)


class Holdings(NamedTuple):
    """Bytes on one device, whatever the batch."""

    parameters: int
    """Kept there, and the most that is gathered there for a while."""
    states: int
    block_gradients: tuple[int, ...]
    """What is left of each block's gradients after its turn."""
    head_gradients: int
    """Of the head, left from the start of the backward pass on."""
    embedding_gradients: int
    """Of the embedding, made at its end, whole."""
    embedding_rest: int
    """What is left of that; nothing where it is added to the head's."""
    host: int
    """In the host's memory."""


def holdings(shape: ModelShape, training: Training) -> Holdings:
    """What parameters, gradients and optimizer state take."""
    itemsize, shards = training.dtype.itemsize, training.shards
    matrix = shape.vocab * shape.dim
    if training.rank:
        trained = [adapter_parameters(layer, training.rank) for layer in shape.layers]
        head = embedding = 0
    else:
        trained, head, embedding = list(shape.layer_parameters), matrix + shape.dim, matrix
    count = sum(trained) + head + (0 if shape.tied else embedding)
    adapters = sum(trained) if training.rank else 0
    whole = shape.parameters * itemsize
    gathered = 0
    if shards > 1 or training.offload_weights:
        gathered = max(2 * max(shape.layer_parameters), matrix) * itemsize
    kept = 0 if training.offload_weights else whole // shards
    offloaded = training.optimizer == "offloaded"
    gone = 0 if offloaded else 1
    return Holdings(
        parameters=kept + gathered + adapters * itemsize // shards,
        states=_state_bytes(shape, training, count) // shards,
        block_gradients=tuple(gone * number * itemsize // shards for number in trained),
        head_gradients=gone * head * itemsize // shards,
        embedding_gradients=embedding * itemsize,
        embedding_rest=0 if shape.tied else gone * embedding * itemsize // shards,
        host=(whole // shards if training.offload_weights else 0) + (count * (12 + itemsize) // shards if offloaded else 0),
    )


def adapter_parameters(spec: BlockSpec, rank: int) -> int:
    """How many parameters adapters of `rank` on all linear layers of a block have."""
    return rank * sum(outputs + inputs for outputs, inputs in linear_shapes(spec).values())


def _state_bytes(shape: ModelShape, training: Training, count: int) -> int:
    if training.optimizer == "adafactor":
        widths = [sum(size) + 2 * training.rank for layer in shape.layers for size in linear_shapes(layer).values()]
        matrices = 0 if training.rank else (1 if shape.tied else 2) * (shape.vocab + shape.dim) + (2 * len(shape.layers) + 1) * shape.dim
        return 4 * (sum(widths) + matrices)
    itemsize = training.dtype.itemsize
    of_each = {"adamw": 2 * itemsize, "adamw-fp32": 12, "adamw-8bit": 2 + 8 / 256, "offloaded": 0, "none": 0}
    return math.ceil(of_each[training.optimizer] * count)


@lru_cache(maxsize=4096)
def head_bytes(
    spec: BlockSpec, vocab: int, softcap: float | None, batch: int, length: int, loss: Loss, dtype: torch.dtype, trained: bool
) -> Bytes:  # fmt: skip
    """What the last norm, the head and the loss take, the blocks' output and its gradient included: on a GPU, on tensors without data.

    "logits": all logits, a copy of them in float32 and cross entropy, as in transformers. "tiled": `functional.linear_cross_entropy`.
    """
    weight = torch.empty(vocab, spec.dim, dtype=dtype, device="meta", requires_grad=trained)
    scale = torch.empty(spec.dim, dtype=dtype, device="meta", requires_grad=trained)
    bias = torch.empty_like(scale).requires_grad_(trained) if spec.norm == "layer" else None
    target = torch.empty(batch, length, dtype=torch.int64, device="meta")

    def logits(x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(stock.norm(x, NormWeights(scale, bias), spec), weight)
        if softcap is not None:
            y = torch.tanh(y / softcap) * softcap
        return torch.nn.functional.cross_entropy(y.float().flatten(0, 1), target.flatten())

    def tiled(x: Tensor) -> Tensor:
        rows = functional.norm(x, scale, bias, kind=spec.norm, eps=spec.norm_eps, offset=spec.norm_offset)
        call = cross_entropy.Loss(softcap=softcap, divide=_unlike_spans)
        return cross_entropy.LinearCrossEntropyFunction.apply(call, rows.flatten(0, 1), weight, None, target.flatten())

    ignored = [t for t in (weight, scale, bias, target) if t is not None]
    return trace(tiled if loss == "tiled" else logits, (batch, length, spec.dim), dtype, "meta", ignored)


def _unlike_spans(total: int, size: int) -> Iterator[slice]:
    """The first two slices and the last: those between allocate and free what the second does, and there are thousands of tiles."""
    parts = list(spans(total, size))
    yield from parts if len(parts) < 4 else (*parts[:2], parts[-1])
