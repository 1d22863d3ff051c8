"""Where a block drops elements, and with which probability: its RNG sites, and those of its projections' adapters."""

from typing import NamedTuple

from torch import Tensor

from .rng import Dropout, Site
from .spec import BlockSpec

PROJECTIONS = ("q", "k", "v", "out", "gate", "up", "down")
"""The projections of a block, as `weights.BlockWeights` calls them. Their order numbers the sites of adapters: it must stay."""

_FIRST_ADAPTER_SITE, _LAST_SITE = 16, 255
MOST_ADAPTERS = (_LAST_SITE - _FIRST_ADAPTER_SITE + 1) // len(PROJECTIONS)
"""Of one projection, with sites of their own."""


def adapter_site(projection: int, adapter: int) -> int:
    """The site of a projection's adapter, both given by number; the same however many adapters other projections have."""
    return _FIRST_ADAPTER_SITE + adapter * len(PROJECTIONS) + projection


class BlockDropout(NamedTuple):
    """The dropout of each site of a block; None where nothing is dropped."""

    attention: Dropout | None = None
    attention_residual: Dropout | None = None
    mlp: Dropout | None = None
    mlp_residual: Dropout | None = None


def drops(spec: BlockSpec) -> bool:
    """Whether a block in training draws any mask, hence must reserve RNG state."""
    return max(spec.attn_dropout, spec.residual_dropout, spec.mlp_dropout) > 0


def block_dropout(spec: BlockSpec, state: Tensor | None) -> BlockDropout:
    """The sites of a block whose forward pass reserved `state` (int64 `[2]`: seed, offset), or of one that drops nothing (None)."""
    if state is None:
        return BlockDropout()

    def site(p: float, number: Site) -> Dropout | None:
        return Dropout(state, p, number) if p > 0 else None

    return BlockDropout(
        attention=site(spec.attn_dropout, Site.ATTENTION),
        attention_residual=site(spec.residual_dropout, Site.ATTENTION_RESIDUAL),
        mlp=site(spec.mlp_dropout, Site.MLP),
        mlp_residual=site(spec.residual_dropout, Site.MLP_RESIDUAL),
    )
