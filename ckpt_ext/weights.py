"""The parameters of a block: two norms and up to seven projections, flattened for autograd and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .projections import Kind, Projection


class NormWeights(NamedTuple):
    """Scale `[dim]` and shift `[dim]` or None of a norm."""

    weight: Tensor
    bias: Tensor | None = None


class BlockWeights(NamedTuple):
    """What a block computes with. `gate` is None in a plain MLP."""

    attention_norm: NormWeights
    q: Projection
    k: Projection
    v: Projection
    out: Projection
    mlp_norm: NormWeights
    gate: Projection | None
    up: Projection
    down: Projection

    def flatten(self) -> tuple[Layout, list[Tensor | None]]:
        """The static layout, and every tensor in its order."""
        kinds: list[tuple[str, Kind]] = []
        tensors: list[Tensor | None] = []
        for name, part in zip(self._fields, self, strict=True):
            if isinstance(part, NormWeights):
                tensors += part
            elif part is not None:
                kinds.append((name, part.kind))
                tensors += part.tensors
        return Layout(tuple(kinds)), tensors


@dataclass(frozen=True, slots=True)
class Layout:
    """Which projections a block has and of which kind; holds no tensor, so it may stay on an autograd context."""

    kinds: tuple[tuple[str, Kind], ...]

    def _slices(self) -> Iterator[tuple[str, Kind | None, slice]]:
        """Each part's name, kind (None: a norm) and place in the flat list."""
        kinds = dict(self.kinds)
        start = 0
        for name in BlockWeights._fields:
            is_norm = name.endswith("_norm")
            if is_norm or name in kinds:
                kind = None if is_norm else kinds[name]
                stop = start + (2 if kind is None else kind.arity)
                yield name, kind, slice(start, stop)
                start = stop

    def split(self, flat: Sequence) -> dict[str, Sequence]:
        """The stretch of `flat` (tensors, or one flag a tensor) that belongs to each part."""
        return {name: flat[place] for name, _, place in self._slices()}

    def bind(self, tensors: Sequence[Tensor | None]) -> BlockWeights:
        """The block's weights over `tensors`, the inverse of `BlockWeights.flatten`."""
        parts: dict = {"gate": None}
        for name, kind, place in self._slices():
            parts[name] = kind.bind(tensors[place]) if kind is not None else NormWeights(*tensors[place])  # type: ignore[arg-type]
        return BlockWeights(**parts)

    def join(self, grads: dict[str, Sequence[Tensor | None]]) -> list[Tensor | None]:
        """One flat list of what `split` takes apart; Nones for the parts that `grads` lacks."""
        return [grad for name, _, place in self._slices() for grad in grads.get(name, [None] * (place.stop - place.start))]
