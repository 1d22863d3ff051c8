"""Where the norms of a block lie: before a branch, and where a branch joins the stream. Forward and backward on plain tensors.

    placement      a half of the block                       norms of the two halves (`weights.BlockWeights`)
    ---------------------------------------------------------------------------------------------------------
    pre            stream + drop(branch(norm(stream)))       attention_norm, mlp_norm
    post           norm(stream + drop(branch(stream)))       attention_norm, mlp_norm
    branch         stream + drop(norm(branch(stream)))       attention_norm, mlp_norm
    sandwich       stream + drop(norm(branch(norm(stream)))) before: attention_norm, mlp_norm; behind: attention_out_norm, mlp_out_norm

Rows of the stream keep x's dtype; a branch takes them, and is normed, in the dtype that branches compute in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from .call import BlockCall
from .gradients import Gradients
from .mlp_products import place_of
from .rng import Dropout
from .spec import BlockSpec
from .weights import BlockWeights, NormWeights


class Half(NamedTuple):
    """The norms of one half by their names in `BlockWeights`; None where there is none."""

    entry: str | None
    """Before the branch."""
    exit: str | None
    """Where the branch joins the stream."""
    over_sum: bool = False
    """Whether the latter is taken of the sum, not of the branch."""

    @property
    def joint(self) -> tuple[str, ...]:
        """What backward needs of where the branch joins the stream: what the norm there is taken of, and the statistics of its rows."""
        return () if self.exit is None else ("joined", "joined_stats")

    def enter(self, call: BlockCall, weights: BlockWeights, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the branch takes of rows of the stream, and the statistics of its norm."""
        if self.entry is None:
            return rows.to(call.dtype), None
        normed, stats = call.backend.norm(rows, *self._norm(weights, self.entry), call.norm)
        return normed.to(call.dtype), stats

    def through_entry(
        self, call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], grad: Tensor | None, rows: Tensor,
        stats: Tensor | None, *, onto: Tensor | None,
    ) -> tuple[Tensor | None, Gradients]:  # fmt: skip
        """Gradient of rows of the stream, given that of what the branch takes, plus `onto`, that of the other paths; and of the norm.

        Nothing is computed where `grad` is None; no gradient of the rows is returned where `onto` is None.
        """
        if self.entry is not None:
            assert stats is not None
            norm = self._norm(weights, self.entry)
            grad_rows, grads = call.through_norm(grad, rows, norm, stats, needs[self.entry], onto=onto)
            return grad_rows, {self.entry: grads}
        if grad is None or onto is None:
            return None, {}
        return call.backend.dropout_add(grad, onto, None), {}

    def join(
        self, call: BlockCall, weights: BlockWeights, branch: Tensor, stream: Tensor, dropout: Dropout | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows of the stream behind this half, and by name what `joint` lists. Where the norm is of the sum, that may lie in `branch`."""
        if self.exit is None:
            return call.backend.dropout_add(branch, stream, dropout), {}
        normed, internals = self._normed(call, weights, branch, stream, dropout)
        return normed if self.over_sum else call.backend.dropout_add(normed, stream, dropout), internals

    def rejoin(
        self, call: BlockCall, weights: BlockWeights, branch: Tensor, stream: Tensor, dropout: Dropout | None
    ) -> dict[str, Tensor]:
        """What `joint` lists, made again."""
        return self._normed(call, weights, branch, stream, dropout)[1]

    def through_join(
        self, call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], grad: Tensor, internals: dict[str, Tensor],
        dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor, Gradients]:  # fmt: skip
        """Gradients of the branch, of the stream before it (either may be `grad` itself) and of the norm; `internals` lose what `joint`
        lists."""
        if self.exit is None:
            return _dropped(call, grad, dropout), grad, {}
        of_norm = grad if self.over_sum else _dropped(call, grad, dropout)
        joined, stats = (internals.pop(name) for name in self.joint)
        norm, wanted = self._norm(weights, self.exit), needs[self.exit]
        through, *params = call.backend.norm_backward(of_norm, joined, *norm, stats, call.norm, params=any(wanted))
        grads: Gradients = {self.exit: [g if need else None for g, need in zip(params, wanted, strict=True)]}
        return (_dropped(call, through, dropout), through, grads) if self.over_sum else (through, grad, grads)

    def _normed(
        self, call: BlockCall, weights: BlockWeights, branch: Tensor, stream: Tensor, dropout: Dropout | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.exit is not None
        norm = self._norm(weights, self.exit)
        if self.over_sum:
            # The stream's dtype, which autocast may have made another than the branch's, is that of the normed sum, too.
            branch = branch.to(stream.dtype)
            joined, normed, stats = call.backend.add_norm(branch, stream, *norm, call.norm, dropout, into=place_of(branch, stream))
        else:
            joined = branch
            normed, stats = call.backend.norm(branch, *norm, call.norm)
        return normed, dict(zip(self.joint, (joined, stats), strict=True))

    @staticmethod
    def _norm(weights: BlockWeights, name: str) -> NormWeights:
        return getattr(weights, name)


class Halves(NamedTuple):
    """The norms of a block."""

    attention: Half
    mlp: Half


def halves(spec: BlockSpec) -> Halves:
    """Where `spec` has its norms."""
    return _HALVES[spec.norm_placement]


def _dropped(call: BlockCall, grad: Tensor, dropout: Dropout | None) -> Tensor:
    return grad if dropout is None else call.backend.dropout(grad, dropout)


_HALVES = {
    "pre": Halves(Half("attention_norm", None), Half("mlp_norm", None)),
    "post": Halves(Half(None, "attention_norm", over_sum=True), Half(None, "mlp_norm", over_sum=True)),
    "branch": Halves(Half(None, "attention_norm"), Half(None, "mlp_norm")),
    "sandwich": Halves(Half("attention_norm", "attention_out_norm"), Half("mlp_norm", "mlp_out_norm")),
}
