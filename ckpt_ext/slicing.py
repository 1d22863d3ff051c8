"""How a block's backward is cut into pieces, so that a piece's intermediates, not the whole block's, are alive at a time.

The MLP half goes by slices of tokens or by slices of the hidden dimension: gate, up and hidden exist for one slice. Of the sums that a cut
splits, the parts are added in float32 or wider:

    by tokens    three weight gradients, kept in float32 between slices: nothing where weights are frozen, the same bytes as the gradients
                 where those are float32, and small beside long rows
    by hidden    the gradient of the normed rows, all of it in float32; each weight gradient is one product over all tokens, written to its
                 place. Backward holds the normed rows, too, and forward the whole hidden layer

Which of them takes less is a matter of shapes: in bfloat16, with all weights trained, by hidden below about as many tokens as there are
hidden units. The attention half, in backward, goes by groups of heads: the gradients of q, k and v take the places of q, k and v group by
group. No cut costs a floating-point operation.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from .spec import BlockSpec
from .weights import BlockWeights

# A matrix product of fewer rows is slower by the row. On a 2-core CPU, at dim 512 and 1024 tokens, a step took 5 % longer in slices of 512
# rows than in one, 11 % in slices of 256 and 30 % in slices of 128. The figures for a GPU, which needs tiles for all its multiprocessors,
# are chosen and not measured; more rows where weights are trained, for their sums are read and written once a slice.
_LEAST_ROWS = {"cpu": 512, "other": 2048}
_LEAST_ROWS_FROZEN = {"cpu": 512, "other": 1024}
_LEAST_ELEMENTS = {"cpu": 1 << 18, "other": 1 << 21}
"""Of a slice of the hidden layer, all tokens of some hidden units."""
_TILE = 128
"""Hidden units of a slice are a multiple of this where they are chosen, a product's tile."""


class Slicing(NamedTuple):
    """The sizes of a block's pieces."""

    tokens: int
    """Tokens in a slice of the MLP half, where that goes by tokens."""
    head_groups: int
    """Groups of heads in the attention half's backward."""
    hidden: int | None = None
    """Hidden units in a slice of the MLP half where it goes by those; None where it goes by tokens, as does what cannot be cut."""


class _Trained(NamedTuple):
    """The MLP's weights that get a gradient: their elements, and the bytes of their gradients."""

    elements: int
    nbytes: int


def slicing(
    spec: BlockSpec, tokens: int, device: torch.device, slices: int | Literal["auto"], dtype: torch.dtype, weights: BlockWeights, *,
    tokens_whole: bool = False,
) -> Slicing:  # fmt: skip
    """The slicing of a block of `tokens` tokens that computes in `dtype`, by the one of two ways that is modelled to have the lower peak.

    A number of slices is the most that either way takes, and the most groups of heads. "auto" chooses as many as bring the MLP's
    intermediates below the size of one block input, unless they would be so small that products of them are slow. `tokens_whole` says
    that tokens are not cut: rows that are added up over ranks go there once.
    """
    projections = [part for part in (weights.gate, weights.up, weights.down) if part is not None]
    tensors = [t for part in projections for t in part.tensors if t is not None and t.requires_grad and torch.is_grad_enabled()]
    trained = _Trained(sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors))
    kind = "cpu" if device.type == "cpu" else "other"
    by_tokens, by_hidden = _candidates(spec, tokens, kind, slices, trained)
    if tokens_whole:
        by_tokens = by_tokens._replace(tokens=max(tokens, 1))
    if by_hidden.hidden is None or spec.mlp_dropout or not spec.adds_late or not all(part.kind.cuttable for part in projections):
        return by_tokens
    return min(by_tokens, by_hidden, key=lambda cut: _peak(spec, tokens, dtype.itemsize, cut, trained))


def _candidates(
    spec: BlockSpec, tokens: int, kind: str, slices: int | Literal["auto"], trained: _Trained
) -> tuple[Slicing, Slicing]:  # fmt: skip
    """The slicing by tokens and that by hidden units, which may not be cut at all."""
    if slices == "auto":
        # `layers * hidden_dim` intermediates and three more rows are alive for a slice of tokens.
        least_rows = (_LEAST_ROWS if trained.elements else _LEAST_ROWS_FROZEN)[kind]
        wanted = (2 if trained.elements else 3) * (_layers(spec) * spec.hidden_dim + 3 * spec.dim)
        rows = max(least_rows, -(-tokens * spec.dim // wanted))
        groups = 8 if tokens >= 8 * least_rows else 4 if tokens >= 4 * least_rows else 2 if tokens > least_rows else 1
        units = max(3 * spec.dim // (4 * _layers(spec)), -(-_LEAST_ELEMENTS[kind] // max(tokens, 1)))
        units = -(-units // _TILE) * _TILE
    else:
        rows, units, groups = max(1, -(-tokens // slices)), -(-spec.hidden_dim // slices), slices
    by_tokens = Slicing(rows, _divisor(spec.kv_heads, groups))
    return by_tokens, by_tokens._replace(hidden=units if units < spec.hidden_dim else None)


def _peak(spec: BlockSpec, tokens: int, itemsize: int, cut: Slicing, trained: _Trained) -> int:
    """About how many bytes a block's backward holds at its peak, beside its input and the gradient of its output.

    Both halves hold q, k, v and the attention output, and of the gradients of the MLP's weights what there is. The MLP half adds mid, whose
    gradient takes its place; the attention half that gradient, those of q, k, v and of the attention output for a group of heads, and, with
    the attention output gone, the normed rows and their gradient.
    """
    wide = max(itemsize, torch.float32.itemsize)
    attention_width, key_width = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    held = 2 * attention_width + key_width
    if cut.hidden is None:
        rows = min(cut.tokens, tokens)
        gradients = trained.elements * wide if rows < tokens else trained.nbytes
        mlp = gradients + itemsize * (tokens * spec.dim + rows * (_layers(spec) * spec.hidden_dim + 3 * spec.dim))
    else:
        rows_of = 3 if spec.residual_dropout else 2
        mlp = trained.nbytes + tokens * (wide * spec.dim + itemsize * (rows_of * spec.dim + _layers(spec) * cut.hidden))
    group = (2 * attention_width + key_width) // cut.head_groups
    attention = trained.nbytes + tokens * itemsize * max(spec.dim + group, 3 * spec.dim - attention_width)
    return tokens * itemsize * held + max(mlp, attention)


def _layers(spec: BlockSpec) -> int:
    """Matrices as wide as the hidden layer that a slice's backward holds: their gradients take their places."""
    return 3 if spec.gated else 2


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`: a group has whole key heads, each with its query heads, as many as any other."""
    return max(divisor for divisor in range(1, min(most, number) + 1) if number % divisor == 0)


def spans(total: int, size: int) -> Iterator[slice]:
    """`0..total` in slices of `size`, the last one shorter; one empty slice of nothing."""
    if total <= size:  # without a range, which makes a compiler compile again for each total
        yield slice(0, total)
    else:
        yield from (slice(start, min(start + size, total)) for start in range(0, total, size))


def working_set(spec: BlockSpec, tokens: int, itemsize: int, *, trained: bool = True) -> int:
    """About how many bytes a block's backward holds at its peak, beside its input, in its automatic slicing on a GPU: a model, good enough
    to weigh blocks against each other. `itemsize` is that of its weights, too, `trained` whether the MLP's get gradients."""
    elements = (3 if spec.gated else 2) * spec.dim * spec.hidden_dim if trained else 0
    gradients = _Trained(elements, elements * itemsize)
    by_tokens, by_hidden = _candidates(spec, tokens, "other", "auto", gradients)
    by_tokens_alone = by_hidden.hidden is None or spec.mlp_dropout or not spec.adds_late
    cuts = [by_tokens] if by_tokens_alone else [by_tokens, by_hidden]
    return tokens * itemsize * spec.dim + min(_peak(spec, tokens, itemsize, cut, gradients) for cut in cuts)
