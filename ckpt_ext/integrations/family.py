"""What a layer class of transformers is in terms of a block: one frozen table a family, read anew at every call."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from ..spec import BlockSpec, Norm, NormPlacement, QkNorm
from ..weights import BlockWeights, NormWeights
from . import parts
from .linears import Fused, fused, linear

Containers = tuple[tuple[str, str], ...]


class DropoutPlaces(NamedTuple):
    """Where a layer says with which probability it drops: paths of numbers or of `nn.Dropout` children."""

    attention: str | None = None
    """Of attention weights."""
    residual: tuple[str, ...] = ()
    """Of either half's output; they must agree."""


@dataclass(frozen=True)
class Family:
    """How the layers of one class are blocks. Paths are attributes of the layer, dotted; classes are named within `module`.

    A part that the layers do not have is None. What of a layer departs from its table (another class at a path, hooks, a forward of its
    own) is refused by name, with NotImplementedError, by `check`, `spec` and `weights`.
    """

    module: str
    """Where the layer's class is defined, below `transformers.models`."""
    layer: str
    containers: Containers
    """Children with a forward that the engine steps around, and their classes."""
    attention: str = "self_attn"
    """The child with `config`, `scaling` and the heads' width."""
    head_dim: str = "head_dim"
    """Its attribute with the heads' width."""
    norm: Norm = "rms"
    norm_class: str | None = None
    """The class of the norms; None means `nn.LayerNorm`."""
    norm_offset: float = 0.0
    placement: NormPlacement = "pre"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_out_norm: str | None = None
    mlp_out_norm: str | None = None
    parallel: str | None = None
    """Its attribute that says whether both halves read the layer's input."""
    qkv: Fused | tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    qk_norm: QkNorm | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    gate_up: Fused | tuple[str, str] = ("mlp.gate_proj", "mlp.up_proj")
    up: str | None = None
    """The up projection of a plain MLP; `gate_up` is not read then."""
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    dropout: DropoutPlaces = field(default_factory=DropoutPlaces)
    window: str | None = None
    """The path of the sliding window."""
    softcap: str | None = None
    rope: str | None = None
    """The path of a switch without which the layer rotates nothing (SmolLM3's layers without positions); None where all rotate."""
    table: str | None = "position_embeddings"
    """The argument with cosines and sines, `[B or 1, T, D]` each, as `cat(f, f)`; None where positions are learned."""
    absent: tuple[str, ...] = ()
    """Attributes that must be missing, None or False: with them the layer computes something else."""

    @property
    def path(self) -> str:
        """The full name of the layer's class."""
        return f"transformers.models.{self.module}.{self.layer}"

    def child(self, layer: nn.Module, path: str) -> Any:
        """The attribute at `path`; raises NotImplementedError where there is none."""
        try:
            return attrgetter(path)(layer)
        except AttributeError as error:
            raise NotImplementedError(f"{path} must be there, as in {self.layer}, got none") from error

    def check(self, layer: nn.Module) -> None:
        """Refuse a layer some child of which, or some function that it calls, does more or other than the table says."""
        parts.own_functions(f"transformers.models.{self.module}", self.child(layer, self.attention).config._attn_implementation)
        for path, name in self.containers:
            parts.plain(path, self.child(layer, path), f"transformers.models.{self.module}.{name}")
        for path in self.absent:
            if getattr(layer, path, None):
                raise NotImplementedError(f"{path} must be absent, got {getattr(layer, path)}")

    def position(self, layer: nn.Module) -> tuple[bool, int | None]:
        """Whether masks are expected to be causal, and the window that they are expected to have."""
        return self.child(layer, self.attention).is_causal, None if self.window is None else self.child(layer, self.window)

    def spec(self, layer: nn.Module, causal: bool, window: int | None, rope_dim: int = 0) -> BlockSpec:
        """The block that `layer` is in its present mode: probabilities are zero where its children are not in training.

        `rope_dim` is how much of a head the call's table rotates, 0 where there is none.
        """
        attention = self.child(layer, self.attention)
        config, head_dim = attention.config, getattr(attention, self.head_dim)
        pointwise = parts.activation(self.activation, self.child(layer, self.activation))
        return BlockSpec(
            dim=config.hidden_size, heads=config.num_attention_heads, head_dim=head_dim,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            hidden_dim=parts.width(self.down, self.child(layer, self.down)),
            norm=self.norm, norm_eps=parts.epsilon(self.attention_norm, self.child(layer, self.attention_norm)),
            norm_offset=self.norm_offset, norm_placement=self.placement,
            parallel=self.parallel is not None and bool(self.child(layer, self.parallel)),
            activation=pointwise if self.up is not None else parts.gated(pointwise),
            causal=causal, window=window, attn_scale=attention.scaling, qk_norm=self.qk_norm,
            rope_dim=rope_dim, softcap=None if self.softcap is None else self.child(layer, self.softcap),
            attn_dropout=self._attention_dropout(layer, attention), residual_dropout=self._residual_dropout(layer),
        )  # fmt: skip

    def weights(self, layer: nn.Module, spec: BlockSpec) -> BlockWeights:
        """The parameters in the engine's form: the layer's own, or views of them."""
        q_width, k_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        if isinstance(self.qkv, Fused):
            q, k, v = fused(self.qkv, self.child(layer, self.qkv.path), (q_width, k_width, k_width), spec)
        else:
            shapes = ((q_width, spec.dim), (k_width, spec.dim), (k_width, spec.dim))
            q, k, v = (linear(path, self.child(layer, path), shape) for path, shape in zip(self.qkv, shapes, strict=True))
        gate = None
        if self.up is not None:
            up = linear(self.up, self.child(layer, self.up), (spec.hidden_dim, spec.dim))
        elif isinstance(self.gate_up, Fused):
            gate, up = fused(self.gate_up, self.child(layer, self.gate_up.path), (spec.hidden_dim, spec.hidden_dim), spec)
        else:
            gate, up = (linear(path, self.child(layer, path), (spec.hidden_dim, spec.dim)) for path in self.gate_up)
        q_norm_width, k_norm_width = spec.qk_norm_widths
        attention_norm, mlp_norm = self._norm(layer, self.attention_norm, spec, spec.dim), self._norm(layer, self.mlp_norm, spec, spec.dim)
        assert attention_norm is not None and mlp_norm is not None
        weights = BlockWeights(
            attention_norm=attention_norm, q=q, k=k, v=v,
            out=linear(self.out, self.child(layer, self.out), (spec.dim, q_width)), mlp_norm=mlp_norm, gate=gate, up=up,
            down=linear(self.down, self.child(layer, self.down), (spec.dim, spec.hidden_dim)),
            q_norm=self._norm(layer, self.q_norm, spec, q_norm_width), k_norm=self._norm(layer, self.k_norm, spec, k_norm_width),
            attention_out_norm=self._norm(layer, self.attention_out_norm, spec, spec.dim),
            mlp_out_norm=self._norm(layer, self.mlp_out_norm, spec, spec.dim),
        )  # fmt: skip
        if weights.across is not None:
            weights.across.share(spec)  # raises where the block cannot be cut
        return weights

    def rotates(self, layer: nn.Module) -> bool:
        """Whether queries and keys of this layer are rotated."""
        return self.table is not None and (self.rope is None or bool(self.child(layer, self.rope)))

    def _norm(self, layer: nn.Module, path: str | None, spec: BlockSpec, width: int) -> NormWeights | None:
        if path is None:
            return None
        kind = "torch.nn.modules.normalization.LayerNorm"
        if self.norm_class is not None:
            kind = f"transformers.models.{self.module}.{self.norm_class}"
        return parts.norm(path, self.child(layer, path), kind, spec.norm_eps, width)

    def _attention_dropout(self, layer: nn.Module, attention: nn.Module) -> float:
        place = self.dropout.attention
        return 0.0 if place is None or not attention.training else parts.probability(place, self.child(layer, place))

    def _residual_dropout(self, layer: nn.Module) -> float:
        dropouts = {path: parts.active_probability(path, self.child(layer, path)) for path in self.dropout.residual}
        if len(set(dropouts.values())) > 1:
            raise NotImplementedError(f"dropout of both halves must be equal, got {dropouts}")
        return next(iter(dropouts.values()), 0.0)

