"""How the scores of an attention become its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from .masks import Mask
from .rng import Dropout


class Scoring(NamedTuple):
    """`weights = drop(softmax(mask(cap(scale * q k^T))))`, with `cap(s) = softcap * tanh(s / softcap)`."""

    mask: Mask
    scale: float
    softcap: float | None = None
    """Bound of a score, applied before the mask (Gemma 2, arXiv:2408.00118)."""
    sinks: Tensor | None = None
    """`[H]`: a logit per head that takes part in the softmax's sum and has no value (gpt-oss; arXiv:2309.17453)."""
    dropout: Dropout | None = None

    def of_heads(self, heads: slice, total: int, query_count: int) -> Scoring:
        """The same for some of `total` heads, each of `query_count` rows of the dropout mask. These may be some of all already."""
        dropout = self.dropout
        if dropout is not None:
            dropout = replace(dropout.rows_from(heads.start * query_count), batch_rows=dropout.batch_rows or total * query_count)
        sinks = None if self.sinks is None else self.sinks[heads]
        return self._replace(mask=self.mask.of_heads(heads), sinks=sinks, dropout=dropout)
