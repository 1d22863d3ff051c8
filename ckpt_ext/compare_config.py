"""What `ckpt-ext compare` trains, and how: every size is an option."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import torch

from .backends import select
from .plan import Plan
from .spec import BackendName, BlockSpec
from .validate import number, one_of, positive_int


def _option(default: Any, help: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices or None})


@dataclass(frozen=True, slots=True)
class Config:
    """What is trained and how. Each field is an option of `ckpt-ext compare`.

    Raises ValueError for sizes that make no model, OSError for a plan that cannot be read, and RuntimeError for a backend or a
    device that is not there.
    """

    blocks: int = _option(8, "transformer blocks")
    dim: int = _option(256, "width of the residual stream")
    heads: int = _option(8, "attention heads")
    kv_heads: int = _option(0, "heads of keys and values; 0 means as many as --heads")
    hidden_dim: int = _option(0, "hidden width of the SwiGLU MLP; 0 means 8/3 of --dim, rounded up to a multiple of 64")
    length: int = _option(512, "symbols in a sequence")
    batch: int = _option(1, "sequences in a batch")
    steps: int = _option(60, "training steps of each run")
    lr: float = _option(1e-3, "AdamW's learning rate, after the warm-up")
    warmup: int = _option(20, "steps over which the learning rate rises from zero")
    residual_dropout: float = _option(0.1, "probability of dropping an element of either half's output")
    mlp_dropout: float = _option(0.1, "probability of dropping a hidden element of the MLP")
    attn_dropout: float = _option(0.0, "probability of dropping an attention weight; above 0 no run can use the stock fused attention")
    backend: BackendName = _option("auto", "who runs our blocks; auto is Triton on a GPU and ATen elsewhere", *get_args(BackendName))
    dtype: str = _option("float32", "of parameters and activations", "float32", "float64", "bfloat16")
    device: str = _option("cpu", "such as cpu or cuda:0")
    seed: int = _option(0, "of weights, batches and masks")
    threads: int = _option(0, "CPU threads; 0 means PyTorch's own choice")
    plan: str = _option("", "plan.json of `ckpt-ext plan`, for as many blocks: one more run")
    text: str = _option("", "file to train on, byte by byte; by default the prose of CPython's help topics")

    def __post_init__(self) -> None:
        for name in ("blocks", "length", "batch", "steps", "warmup"):
            positive_int(name, getattr(self, name))
        number("lr", self.lr)
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}")
        if not 0 <= self.threads <= (os.cpu_count() or 1):
            raise ValueError(f"threads must be between 0 and the {os.cpu_count()} of this machine, got {self.threads}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")
        one_of("dtype", self.dtype, _choices("dtype"))
        _ = self.spec
        planned = self.planned
        if planned is not None and len(planned.blocks) != self.blocks:
            raise ValueError(f"plan must be for blocks={self.blocks}, got one for {len(planned.blocks)}")
        try:
            device = torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as error:  # torch without the device's support asserts
            raise RuntimeError(f"device {self.device!r} must be usable, got: {str(error).splitlines()[0]}") from error
        if device.type == "meta":
            raise ValueError("device must hold data, got 'meta'")
        select(self.backend, device)

    @property
    def spec(self) -> BlockSpec:
        """The block that is stacked."""
        return BlockSpec(
            dim=self.dim, heads=self.heads, kv_heads=self.kv_heads, hidden_dim=self.hidden_dim or -(-8 * self.dim // 3 // 64) * 64,
            rope_theta=1e4, attn_dropout=self.attn_dropout, residual_dropout=self.residual_dropout, mlp_dropout=self.mlp_dropout,
        )  # fmt: skip

    @property
    def planned(self) -> Plan | None:
        """The plan in the file that `plan` names."""
        return Plan.load(self.plan) if self.plan else None

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch's."""
        return getattr(torch, self.dtype)

    @property
    def input_bytes(self) -> int:
        """Bytes of one block's input."""
        return self.batch * self.length * self.dim * self.torch_dtype.itemsize

    def arguments(self) -> list[str]:
        """The command-line arguments that give this config."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return [word for name, value in changed for word in (f"--{name.replace('_', '-')}", str(value))]


def _choices(name: str) -> tuple[str, ...]:
    return next(f.metadata["choices"] for f in fields(Config) if f.name == name)
