"""Buffers in the host's memory, as an operator, so that whoever counts memory can tell them from the device's, on a CPU too."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("ckpt_ext", "FRAGMENT")
_library.define("host_buffer(Tensor x) -> Tensor")


def buffer_for(x: Tensor) -> Tensor:
    """An empty tensor for the elements of x in the host's memory, page-locked where x lies on an accelerator."""
    return torch.ops.ckpt_ext.host_buffer(x)


def is_buffer(func: object) -> bool:
    """Whether the operator `func` makes such buffers."""
    return func is torch.ops.ckpt_ext.host_buffer.default


@torch.library.impl(_library, "host_buffer", "CompositeExplicitAutograd")
def _host_buffer(x: Tensor) -> Tensor:
    # PyTorch's allocator of page-locked memory keeps what is freed for the next step.
    return torch.empty_like(x, device="meta" if x.device.type == "meta" else "cpu", pin_memory=x.device.type not in ("cpu", "meta"))


@torch.library.register_fake("ckpt_ext::host_buffer", lib=_library)
def _fake_host_buffer(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta" if x.device.type == "meta" else "cpu")
