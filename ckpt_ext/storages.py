"""The storages that tensors lie in: what memory is counted in, since views share them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_iter


def storages(tree: object) -> Iterator[UntypedStorage]:
    """The storages of the strided tensors in `tree`; other layouts have none of their own."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield leaf.untyped_storage()
