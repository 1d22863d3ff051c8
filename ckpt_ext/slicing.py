"""How a block's backward is cut into pieces, so that a piece's intermediates, not the whole block's, are alive at a time.

The MLP half goes by slices of tokens: gate, up and hidden are `hidden_dim` wide, and exist for one slice. The attention half, in backward,
goes by groups of heads: the gradients of q, k and v take the places of q, k and v group by group.

Neither cut costs a floating-point operation, and neither splits a sum but those over tokens, in the MLP's weight gradients, which are
kept in float32 between slices.
"""

from collections.abc import Iterator

import torch

from .spec import BlockSpec

# Fewer rows than this do not fill a matrix product's pipeline: a CPU core's cache blocks; a GPU's multiprocessors.
_LEAST_ROWS = {"cpu": 128, "other": 2048}
_HEAD_GROUPS = 4


def token_slices(spec: BlockSpec, tokens: int, device: torch.device, slices: int | None) -> int:
    """Tokens in a slice of the MLP half, given how many slices are wanted; None: as many as bring its intermediates near one block input.

    Gate, up, hidden and the gradient of hidden are alive together: about `4 * hidden_dim / dim` inputs of the slice.
    """
    if slices is not None:
        return max(1, -(-tokens // slices))
    least = _LEAST_ROWS["cpu" if device.type == "cpu" else "other"]
    wanted = max(1, round(4 * spec.hidden_dim / spec.dim))
    return max(least, -(-tokens // wanted))


def head_groups(spec: BlockSpec, slices: int | None) -> int:
    """Groups of heads of the attention half's backward: a number of key heads, each with its query heads, is one group."""
    wanted = _HEAD_GROUPS if slices is None else slices
    return max(groups for groups in range(1, min(wanted, spec.kv_heads) + 1) if spec.kv_heads % groups == 0)


def spans(total: int, size: int) -> Iterator[slice]:
    """`0..total` in slices of `size`, the last one shorter; one empty slice of nothing."""
    yield from (slice(start, min(start + size, total)) for start in range(0, max(total, 1), size))
