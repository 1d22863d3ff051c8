"""The storages that tensors lie in: what memory is counted in, since views share them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter


def storages(tree: object) -> Iterator[UntypedStorage]:
    """The storages of the strided tensors in `tree`; other layouts have none of their own.

    A tensor that wraps others, a DTensor for one, stands for those: its own storage has no memory behind it, and the whole's size.
    """
    for leaf in tree_iter(tree):
        if is_traceable_wrapper_subclass(leaf):
            yield from storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield leaf.untyped_storage()
