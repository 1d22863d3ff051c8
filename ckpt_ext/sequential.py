"""A chain of blocks in segments: fewer inputs kept, for one more forward pass in all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .adopt import plain
from .masks import AttentionMask
from .modules import TransformerBlock
from .partition import check_lengths, even_lengths, least_peak_lengths
from .segments import Place, Segment
from .slicing import working_set
from .validate import instance, positive_int


def checkpoint_sequential(
    blocks: Iterable[TransformerBlock],
    x: Tensor,
    *,
    segments: int | Sequence[int] | Literal["auto"] = "auto",
    mask: AttentionMask | None = None,
) -> Tensor:
    """`x [B, T, dim]` through `blocks` one after another, of which only the first of each segment keeps its input.

    Backward rebuilds the inputs of a segment's other blocks, then goes block by block, each with its own small working set. The gradients
    are those of the blocks called one by one, bit for bit. `segments` is their number, of lengths as equal as can be, or "auto": as many,
    the earlier ones longer, as make the peak least, by the sizes of the blocks' inputs and working sets (where all
    inputs are offloaded, one a block: give a number to spare the host's memory); or their lengths, as a
    `ckpt_ext.plan.Plan` has them, where a block alone in its segment may have any policy.

    Raises NotImplementedError, naming the block, for one that is no plain `TransformerBlock` or has hooks, which a rebuild would skip;
    ValueError for one whose policy keeps more than its input, and for lengths that do not sum to the number of blocks. `torch.compile`
    leaves the whole chain uncompiled.
    """
    if isinstance(blocks, TransformerBlock) or not isinstance(blocks, Iterable):
        raise ValueError(f"blocks must be an iterable of TransformerBlock, got {type(blocks).__name__}")
    instance("x", x, Tensor)
    if x.dim() != 3:
        raise ValueError(f"x must have shape [B, T, dim], got {list(x.shape)}")
    chain = list(blocks)
    alone: Sequence[bool] = [False] * len(chain)
    if isinstance(segments, Sequence) and not isinstance(segments, str):
        check_lengths(segments, len(chain))
        alone = [length == 1 for length in segments for _ in range(length)]
    for index, block in enumerate(chain):
        plain(f"blocks[{index}]", block, TransformerBlock)
        if block.policy.save != "input" and not alone[index]:
            raise ValueError(f"blocks[{index}] must keep its input alone in a segment, got save={block.policy.save!r}")
    # A graph cannot hold what forward notes down for backward. The decorator would import the compiler with this package.
    run = torch.compiler.disable(_through) if torch.compiler.is_compiling() else _through
    return run(chain, x, _lengths(chain, x, segments), mask)


def _through(chain: Sequence[TransformerBlock], x: Tensor, lengths: Sequence[int], mask: AttentionMask | None) -> Tensor:
    for length in lengths:
        segment, members, chain = Segment(), chain[:length], chain[length:]
        if length == 1:
            x = members[0](x, mask=mask)
            continue
        position = 0
        for block in members:
            x = block(x, mask=mask, place=Place(segment, position))
            # Blocks that need no gradient keep nothing; the segment begins with the first that does.
            position += x.requires_grad
    return x


def _lengths(chain: Sequence[TransformerBlock], x: Tensor, segments: int | Sequence[int] | Literal["auto"]) -> Sequence[int]:
    if isinstance(segments, Sequence) and not isinstance(segments, str):
        return segments
    if segments != "auto":
        positive_int("segments", segments)
        return even_lengths(len(chain), segments)
    if not torch.is_grad_enabled():
        return [len(chain)]
    if all(block.policy.offload for block in chain):
        return [1] * len(chain)  # no input is kept on the device, so a rebuild would only add to the peak
    tokens = x.size(0) * x.size(1)
    inputs = [tokens * block.spec.dim * x.element_size() for block in chain]
    trained = [any(parameter.requires_grad for parameter in block.parameters()) for block in chain]
    working_sets = [working_set(b.spec, tokens, x.element_size(), trained=t) for b, t in zip(chain, trained, strict=True)]
    return least_peak_lengths(inputs, working_sets)
