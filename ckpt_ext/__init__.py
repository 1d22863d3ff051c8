"""A recompute engine for training transformers: blocks keep only their input, and backward rebuilds the rest."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import functional as functional
from . import rng as rng
from .checkpoint import checkpoint as checkpoint
from .masks import AttentionMask as AttentionMask
from .masks import attention_mask as attention_mask
from .modules import EagerBlock as EagerBlock
from .modules import TransformerBlock as TransformerBlock
from .sequential import checkpoint_sequential as checkpoint_sequential
from .spec import BlockSpec as BlockSpec
from .spec import Policy as Policy

if TYPE_CHECKING:
    from .integrations import SwapReport as SwapReport
    from .integrations import swap as swap
    from .integrations import unswap as unswap
    from .integrations.trainer import SwapCallback as SwapCallback
    from .verification import Verification as Verification
    from .verification import verify as verify

_LAZY = {
    "swap": "integrations", "unswap": "integrations", "SwapReport": "integrations", "SwapCallback": "integrations.trainer",
    "verify": "verification", "Verification": "verification",
}  # fmt: skip
"""Where public names are that are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
