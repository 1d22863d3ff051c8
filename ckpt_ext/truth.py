"""A run in float64 throughout, to measure the errors of others against: casts to narrower dtypes, which many models make, are left out."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_FACTORIES = {"arange", "empty", "empty_strided", "full", "ones", "rand", "randn", "scalar_tensor", "zeros"}


class Float64Throughout(TorchDispatchMode):
    """While it is on, float64 tensors stay float64, whatever dtype they are cast to, and new floating tensors are float64.

    For a model in float64 that casts, as Hugging Face's norms, softmax and rotary angles do to float32: its results are then those of its
    formula. Integers that are cast to a floating dtype become float64, too.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        casts = name in ("_to_copy", "to") or name in _FACTORIES or name.startswith(("new_", "full_", "zeros_", "ones_", "empty_"))
        if casts and kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
