"""Transformer blocks as modules: the engine's, and the same parameters in plain eager PyTorch."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from . import adopt, functional, recomputed, reference, rope
from .masks import AttentionMask
from .segments import Place
from .sites import drops
from .spec import BackendName, BlockSpec, Policy
from .validate import instance, one_of
from .weights import BlockWeights, NormWeights, Sinks


class TransformerBlock(nn.Module):
    """A transformer block that keeps between forward and backward what `policy` says, its input alone by default.

    `y = block(x)` with x and y `[B, T, spec.dim]`, or `block(x, mask=attention_mask(...))` with documents, padding or a dense mask.
    Parameters live in ordinary `nn.Linear`, `nn.RMSNorm` and `nn.LayerNorm` children, whose forward is stepped around: a child that has
    been replaced or hooked raises NotImplementedError by name at the next call.

    Args:
        spec: every static property of the block.
        policy: what is kept; the gradients do not depend on it.
        backend: "auto" (Triton on a GPU, ATen elsewhere), "triton" or "aten".
        dtype, device: of the parameters; torch's defaults if not given.
    """

    def __init__(
        self,
        spec: BlockSpec,
        *,
        policy: Policy | None = None,
        backend: BackendName = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        instance("spec", spec, BlockSpec)
        instance("policy", policy or Policy(), Policy)
        one_of("backend", backend, get_args(BackendName))
        self.spec, self.policy, self.backend = spec, policy or Policy(), backend
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        query_width, key_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        make_norm = nn.RMSNorm if spec.norm == "rms" else nn.LayerNorm
        self.attention_norm = make_norm(spec.dim, eps=spec.norm_eps, **where)
        self.q_proj = nn.Linear(spec.dim, query_width, bias=spec.qkv_bias, **where)
        self.k_proj = nn.Linear(spec.dim, key_width, bias=spec.qkv_bias, **where)
        self.v_proj = nn.Linear(spec.dim, key_width, bias=spec.qkv_bias, **where)
        self.out_proj = nn.Linear(query_width, spec.dim, bias=spec.out_bias, **where)
        self.mlp_norm = make_norm(spec.dim, eps=spec.norm_eps, **where)
        self.gate_proj = nn.Linear(spec.dim, spec.hidden_dim, bias=spec.mlp_bias, **where) if spec.gated else None
        self.up_proj = nn.Linear(spec.dim, spec.hidden_dim, bias=spec.mlp_bias, **where)
        self.down_proj = nn.Linear(spec.hidden_dim, spec.dim, bias=spec.mlp_bias, **where)
        qk_norms = (make_norm(width, eps=spec.norm_eps, **where) if spec.qk_norm else None for width in spec.qk_norm_widths)
        self.q_norm, self.k_norm = qk_norms
        self.sinks = nn.Parameter(torch.zeros(spec.heads, **where)) if spec.sinks else None
        sandwich = spec.norm_placement == "sandwich"
        out_norms = (make_norm(spec.dim, eps=spec.norm_eps, **where) if sandwich else None for _ in range(2))
        self.attention_out_norm, self.mlp_out_norm = out_norms
        if spec.norm_offset:
            with torch.no_grad():
                for norm in self.children():
                    if isinstance(norm, make_norm):
                        norm.weight.sub_(spec.norm_offset)

    def weights(self) -> BlockWeights:
        """The parameters in the engine's form; raises NotImplementedError for a child that it could not honour, or hooks on all modules."""
        adopt.no_hooks_on_all_modules()
        return BlockWeights(
            attention_norm=self._norm("attention_norm", self.spec.dim),
            q=adopt.dense("q_proj", self.q_proj),
            k=adopt.dense("k_proj", self.k_proj),
            v=adopt.dense("v_proj", self.v_proj),
            out=adopt.dense("out_proj", self.out_proj),
            mlp_norm=self._norm("mlp_norm", self.spec.dim),
            gate=None if self.gate_proj is None else adopt.dense("gate_proj", self.gate_proj),
            up=adopt.dense("up_proj", self.up_proj),
            down=adopt.dense("down_proj", self.down_proj),
            q_norm=self._optional_norm("q_norm", self.spec.qk_norm_widths[0]),
            k_norm=self._optional_norm("k_norm", self.spec.qk_norm_widths[1]),
            sinks=None if self.sinks is None else Sinks(self.sinks),
            attention_out_norm=self._optional_norm("attention_out_norm", self.spec.dim),
            mlp_out_norm=self._optional_norm("mlp_out_norm", self.spec.dim),
        )

    def _norm(self, name: str, width: int) -> NormWeights:
        return adopt.norm(name, getattr(self, name), self.spec, width)

    def _optional_norm(self, name: str, width: int) -> NormWeights | None:
        return None if getattr(self, name) is None else self._norm(name, width)

    def forward(self, x: Tensor, *, mask: AttentionMask | None = None, place: Place | None = None) -> Tensor:
        return functional.block(
            x, self.weights(), self.spec, mask=mask, policy=self.policy, backend=self.backend, training=self.training, place=place
        )

    def extra_repr(self) -> str:
        return f"{self.spec}, save={self.policy.save!r}, backend={self.backend!r}"


class EagerBlock(TransformerBlock):
    """The same block, parameters and masks in plain eager PyTorch: what `TransformerBlock` is compared with.

    Attention goes through `scaled_dot_product_attention` where that can do it.
    """

    # Its intermediates are autograd's own, so it has no place in a segment.
    def forward(self, x: Tensor, *, mask: AttentionMask | None = None) -> Tensor:  # type: ignore[override]
        cos, sin = rope.table(self.spec, x.size(1), x.dtype, x.device)
        table = None if cos is None or sin is None else (cos, sin)
        state = recomputed.reserve(x.device) if self.training and drops(self.spec) else None
        return reference.block(x, self.weights(), self.spec, table, state, mask=mask, fused=True)
