"""How a block's backward is cut into pieces, so that a piece's intermediates, not the whole block's, are alive at a time.

The MLP half goes by slices of tokens: gate, up and hidden are `hidden_dim` wide, and exist for one slice. The attention half, in backward,
goes by groups of heads: the gradients of q, k and v take the places of q, k and v group by group.

Neither cut costs a floating-point operation, and neither splits a sum but those over tokens, in the MLP's weight gradients, which are
kept in float32 between slices.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from .spec import BlockSpec

# A matrix product of fewer rows is slower by the row. On a 2-core CPU, at dim 512 and 1024 tokens, a step took 5 % longer in slices of 512
# rows than in one, 11 % in slices of 256 and 30 % in slices of 128. The figure for a GPU, which needs tiles for all its multiprocessors, is
# chosen and not measured.
_LEAST_ROWS = {"cpu": 512, "other": 2048}
_HEAD_GROUPS = 4


class Slicing(NamedTuple):
    """Tokens in a slice of the MLP half, and groups of heads in the attention half's backward."""

    tokens: int
    head_groups: int


def slicing(spec: BlockSpec, tokens: int, device: torch.device, slices: int | Literal["auto"]) -> Slicing:
    """The slicing of a block of `tokens` tokens in `slices` slices, with at most as many groups of heads.

    "auto" chooses as many as bring the MLP's intermediates near the size of one block input: gate, up, hidden and the gradient of hidden are
    alive together, about `4 * hidden_dim / dim` inputs of the slice.
    """
    if slices == "auto":
        wanted = max(1, round(4 * spec.hidden_dim / spec.dim))
        size = max(_LEAST_ROWS["cpu" if device.type == "cpu" else "other"], -(-tokens // wanted))
        return Slicing(size, _divisor(spec.kv_heads, _HEAD_GROUPS if tokens > size else 1))
    return Slicing(max(1, -(-tokens // slices)), _divisor(spec.kv_heads, slices))


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`: a group has whole key heads, each with its query heads, as many as any other."""
    return max(divisor for divisor in range(1, min(most, number) + 1) if number % divisor == 0)


def spans(total: int, size: int) -> Iterator[slice]:
    """`0..total` in slices of `size`, the last one shorter; one empty slice of nothing."""
    yield from (slice(start, min(start + size, total)) for start in range(0, max(total, 1), size))


def working_set(spec: BlockSpec, tokens: int, itemsize: int) -> int:
    """About how many bytes a block's backward holds at its peak, beside inputs: a model, good enough to weigh blocks against each other.

    Both halves hold q, k, v and the attention output. The MLP half adds the gradients of y and mid and a slice's intermediates, about as
    large as one more input; the attention half the gradients of mid, of the attention output and of the normed rows, and those of a group
    of heads.
    """
    attention_width, key_width = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    held = 2 * attention_width + key_width
    group = (attention_width + key_width) // _divisor(spec.kv_heads, _HEAD_GROUPS)
    return tokens * itemsize * (held + max(3 * spec.dim, 2 * spec.dim + attention_width + group))
