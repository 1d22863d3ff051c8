"""What a block is (`BlockSpec`) and what of it is kept between forward and backward (`Policy`)."""

from dataclasses import dataclass
from typing import Literal, get_args

from .validate import bound, instance, number, one_of, positive_int, probability, score_scale, window_size

Norm = Literal["rms", "layer"]
NormPlacement = Literal["pre", "post", "branch", "sandwich"]
QkNorm = Literal["head", "row"]
Save = Literal["input", "attention", "all"]
BackendName = Literal["auto", "triton", "aten"]

GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "relu2glu": "relu2"}
"""Gated MLPs, `down(f(gate(x)) * up(x))`, by name, with their f (Shazeer 2020, arXiv:2002.05202)."""

PLAIN_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""Plain MLPs, `down(f(up(x)))`: SiLU, GELU by erf and by tanh (arXiv:1606.08415), ReLU and squared ReLU (arXiv:2109.08668)."""


def is_gated(activation: str) -> bool:
    """Whether `activation` names a gated MLP."""
    return activation in GATED_ACTIVATIONS


def pointwise(activation: str) -> str:
    """The elementwise function of `activation`: "swiglu" and "silu" both give "silu"."""
    return GATED_ACTIVATIONS.get(activation, activation)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Every static property of a transformer block, `y [B, T, dim]` of `x [B, T, dim]`.

    With `attn(n) = out(attention(q, k, v of n))`, and N1, N2 the block's `attention_norm` and `mlp_norm`, by `norm_placement`:

        pre         mid = x + drop(attn(N1(x)))         y = mid + drop(mlp(N2(mid)))         Llama, GPT-2
        post        mid = N1(x + drop(attn(x)))         y = N2(mid + drop(mlp(mid)))         BERT; arXiv:1706.03762
        branch      mid = x + drop(N1(attn(x)))         y = mid + drop(N2(mlp(mid)))         OLMo 2, arXiv:2501.00656
        sandwich    mid = x + drop(M1(attn(N1(x))))     y = mid + drop(M2(mlp(N2(mid))))     Gemma 2, arXiv:2408.00118

    with M1, M2 its `attention_out_norm` and `mlp_out_norm`; and where `parallel`, with "pre" alone,
    `y = x + drop(attn(N1(x))) + drop(mlp(N2(x)))` (GPT-NeoX, arXiv:2204.06745).

    Raises ValueError where a value makes no block, naming the field.
    """

    dim: int
    heads: int
    hidden_dim: int
    kv_heads: int = 0
    """Heads of keys and values, a divisor of `heads`; 0 means as many as `heads`."""
    head_dim: int = 0
    """Width of a head; 0 means `dim // heads`."""
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    """Added to the norm weight in float32 before it scales: 1.0 is Gemma's `1 + w`."""
    norm_placement: NormPlacement = "pre"
    parallel: bool = False
    """Whether the MLP reads the block's input, not what attention has been added to."""
    activation: str = "swiglu"
    rope_theta: float | None = None
    """Base of the rotary embedding (arXiv:2104.09864), halves of a head rotated against each other; None means none."""
    rope_dim: int = 0
    """How many leading elements of a head are rotated; 0 means all."""
    causal: bool = True
    window: int | None = None
    """Sliding window (arXiv:2004.05150): a query sees the `window` keys that end with its own where causal, else those less than `window`
    away to either side; None means no bound."""
    attn_scale: float | None = None
    """What attention scores are multiplied by; None means `head_dim ** -0.5`."""
    softcap: float | None = None
    """Scores s become `softcap * tanh(s / softcap)` before the mask (Gemma 2, arXiv:2408.00118); None leaves them."""
    qk_norm: QkNorm | None = None
    """A norm of the block's kind over queries and keys before their rotation: of each head ("head": Qwen 3, Gemma 3) or of all heads of a
    token together ("row": OLMo 2); None means none."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax's sum and has no value (gpt-oss; arXiv:2309.17453)."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attn_dropout: float = 0.0
    """Probability of dropping an attention weight."""
    residual_dropout: float = 0.0
    """Probability of dropping an element of either half's output before it joins the residual stream."""
    mlp_dropout: float = 0.0
    """Probability of dropping a hidden element of the MLP, after the activation."""

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "hidden_dim"):
            positive_int(name, getattr(self, name))
        self._default("kv_heads", self.heads)
        if not self.head_dim and self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads={self.heads} where head_dim is not given, got {self.dim}")
        self._default("head_dim", self.dim // self.heads)
        self._default("rope_dim", self.head_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={self.heads}, got {self.kv_heads}")
        for name in ("parallel", "causal", "sinks", "qkv_bias", "out_bias", "mlp_bias"):
            instance(name, getattr(self, name), bool)
        number("norm_eps", self.norm_eps)
        number("norm_offset", self.norm_offset)
        if self.rope_theta is not None:
            number("rope_theta", self.rope_theta)
        if self.rope_theta is not None and not self.rope_theta > 0:
            raise ValueError(f"rope_theta must be positive, got {self.rope_theta}")
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            if self.rope_theta is not None:
                raise ValueError(f"rope_dim must be even and at most head_dim={self.head_dim}, got {self.rope_dim}")
        one_of("norm", self.norm, get_args(Norm))
        one_of("norm_placement", self.norm_placement, get_args(NormPlacement))
        if self.parallel and self.norm_placement != "pre":
            raise ValueError(f"parallel must be False where norm_placement={self.norm_placement!r}, got True")
        if self.qk_norm is not None:
            one_of("qk_norm", self.qk_norm, get_args(QkNorm))
        window_size("window", self.window)
        bound("softcap", self.softcap)
        if self.attn_scale is not None:
            score_scale("attn_scale", self.attn_scale)
        one_of("activation", self.activation, (*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS))
        if not self.norm_eps >= 0:
            raise ValueError(f"norm_eps must be non-negative, got {self.norm_eps}")
        for name in ("attn_dropout", "residual_dropout", "mlp_dropout"):
            probability(name, getattr(self, name))

    def _default(self, name: str, value: int) -> None:
        if getattr(self, name) == 0:
            object.__setattr__(self, name, value)
        positive_int(name, getattr(self, name))

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attn_scale is None else self.attn_scale

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """How wide the rows are that the norms of queries and of keys go over, where the block has such norms."""
        if self.qk_norm == "row":
            return self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.head_dim, self.head_dim

    @property
    def adds_late(self) -> bool:
        """Whether the sum that ends the attention half and the norm that begins the MLP's are one operation: the plain pre-norm block."""
        return self.norm_placement == "pre" and not self.parallel

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate projection beside the up projection."""
        return is_gated(self.activation)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a block keeps between forward and backward.

    "input": its input alone. "attention": also the attention output and its log-sum-exp, so that attention is not run again.
    "all": every intermediate; nothing is recomputed. The gradients of the three are equal bit for bit.
    """

    save: Save = "input"
    slices: int | Literal["auto"] = "auto"
    """At most how many slices the MLP half is run in, and groups of heads the attention half's backward: more mean less memory. "auto"
    chooses by shape and device. The MLP's slices are of tokens or of hidden units, whichever is modelled to take less for the shape and for
    what of it is trained (`ckpt_ext.slicing`); always of tokens where `mlp_dropout` is above zero, where a fused kernel makes the hidden
    layer, and where norms or branches lie otherwise than in a plain pre-norm block. A block that is cut across ranks is not sliced by
    tokens. Bits are equal between policies of equal slices, where the same weights are trained."""
    offload: bool = False
    """Whether the input waits for backward in the host's memory (`ckpt_ext.offload`)."""

    def __post_init__(self) -> None:
        one_of("save", self.save, get_args(Save))
        if self.slices != "auto":
            positive_int("slices", self.slices)
        instance("offload", self.offload, bool)
        if self.offload and self.save == "all":
            raise ValueError('offload must be False where save="all" keeps what is far larger than the input, got True')
