"""The parameters of a block, flattened for autograd and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .projections import Dense, Projection
from .spec import BlockSpec
from .tensor_parallel import Share, TensorParallel


class _PlainKind(NamedTuple):
    """The kind of a part that is no more than its tensors."""

    part: Any
    arity: int

    def bind(self, tensors: Sequence[Tensor | None]) -> Any:
        return self.part(*tensors)


class NormWeights(NamedTuple):
    """Scale and shift of a norm, as wide as its rows; the shift may be None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def kind(self) -> _PlainKind:
        return _NORM

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias


class Sinks(NamedTuple):
    """Attention sinks: one logit per head, `[heads]`."""

    logits: Tensor

    @property
    def kind(self) -> _PlainKind:
        return _SINKS

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.logits,)


_PROJECTIONS = ("q", "k", "v", "out", "gate", "up", "down")
_NORM, _SINKS = _PlainKind(NormWeights, 2), _PlainKind(Sinks, 1)


class BlockWeights(NamedTuple):
    """What a block computes with. A part that the block does not have is None."""

    attention_norm: NormWeights
    q: Projection
    k: Projection
    v: Projection
    out: Projection
    mlp_norm: NormWeights
    gate: Projection | None
    up: Projection
    down: Projection
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    sinks: Sinks | None = None
    attention_out_norm: NormWeights | None = None
    mlp_out_norm: NormWeights | None = None

    def check(self, spec: BlockSpec) -> None:
        """Raise ValueError, naming the part, where a part that a block of `spec` has is None, or one that it has not is given."""
        for field, names, has in (
            ("norm_placement", ("attention_norm", "mlp_norm"), True),
            ("norm_placement", ("attention_out_norm", "mlp_out_norm"), spec.norm_placement == "sandwich"),
            ("activation", ("gate",), spec.gated),
            ("qk_norm", ("q_norm", "k_norm"), spec.qk_norm is not None),
            ("sinks", ("sinks",), spec.sinks),
        ):
            for name in names:
                part = getattr(self, name)
                if (part is not None) != has:
                    got = "None" if part is None else type(part).__name__
                    raise ValueError(f"{name} must be {'given' if has else 'None'} where {field}={getattr(spec, field)!r}, got {got}")

    @property
    def across(self) -> TensorParallel | None:
        """The ranks that the block is cut across. Raises NotImplementedError, naming the part, where only some of it is, or otherwise."""
        parts = {name: getattr(self, name) for name in _PROJECTIONS}
        shares = {name: part.share if isinstance(part, Dense) else None for name, part in parts.items() if part is not None}
        across = next((share.across for share in shares.values() if share is not None), None)
        if across is None:
            return None
        for name, share in shares.items():
            wanted = Share(across, "in" if name in ("out", "down") else "out")
            if share != wanted:
                got = "one that is whole" if share is None else f"one cut along {share.cut!r}" if share.across == across else "other ranks"
                raise NotImplementedError(f"{name} must be cut along {wanted.cut!r} across the ranks of the other projections, got {got}")
        return across

    def flatten(self) -> tuple[Layout, list[Tensor | None]]:
        """The static layout, and every tensor in its order."""
        kinds: list[tuple[str, Any]] = []
        tensors: list[Tensor | None] = []
        for name, part in zip(self._fields, self, strict=True):
            if part is not None:
                kinds.append((name, part.kind))
                tensors += part.tensors
        return Layout(tuple(kinds)), tensors

    def rows_from(self, row: int) -> BlockWeights:
        """The weights for rows of which the first is row `row` of all: each projection's own `rows_from`."""
        if row == 0:
            return self
        projections = {name: getattr(self, name) for name in _PROJECTIONS}
        return self._replace(**{name: part.rows_from(row) for name, part in projections.items() if part is not None})


@dataclass(frozen=True, slots=True)
class Layout:
    """Which parts a block has and of which kind; holds no tensor, so it may stay on an autograd context."""

    kinds: tuple[tuple[str, Any], ...]

    def _slices(self) -> Iterator[tuple[str, Any, slice]]:
        """Each part's name, kind and place in the flat list."""
        start = 0
        for name, kind in self.kinds:
            yield name, kind, slice(start, start + kind.arity)
            start += kind.arity

    def split(self, flat: Sequence) -> dict[str, Sequence]:
        """The stretch of `flat` (tensors, or one flag a tensor) that belongs to each part."""
        return {name: flat[place] for name, _, place in self._slices()}

    def bind(self, tensors: Sequence[Tensor | None]) -> BlockWeights:
        """The block's weights over `tensors`, the inverse of `BlockWeights.flatten`."""
        parts: dict = {"gate": None}
        for name, kind, place in self._slices():
            parts[name] = kind.bind(tensors[place])
        return BlockWeights(**parts)

    def join(self, grads: dict[str, Sequence[Tensor | None]]) -> list[Tensor | None]:
        """One flat list of what `split` takes apart; Nones for the parts that `grads` lacks."""
        return [grad for name, kind, _ in self._slices() for grad in grads.get(name, [None] * kind.arity)]
