"""Shapes of models: what decides how much memory a model takes, without its weights.

`load` knows some public models by name, and reads the `config.json` of a Hugging Face model, as plain JSON, without transformers.

A layer is a `BlockSpec`, whose norms stand before each half. Norms behind a half (Gemma 2 and 3 have them beside, OLMo 2 in place of those
before) make no more difference to the activations than a normed row of a half; their weights are counted, in `other_per_layer`.
What changes no size (scaling of the rotary embedding, initialisation) is not read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .spec import BlockSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: an embedding, blocks, a norm, and a head without a bias.

    Raises ValueError where the layers are none or differ in `dim`, or the vocabulary is empty.
    """

    name: str
    layers: tuple[BlockSpec, ...]
    vocab: int
    """Symbols of the embedding and of the head."""
    tied: bool
    """Whether embedding and head are one matrix."""
    max_length: int | None = None
    """Tokens that the model was made for, where that is known."""
    softcap: float | None = None
    """Bound of the logits (Gemma 2, arXiv:2408.00118)."""
    other_per_layer: int = 0
    """Parameters of a layer that its `BlockSpec` has no place for: norms after its halves."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"layers must not be empty, got {self.layers}")
        if len({layer.dim for layer in self.layers}) > 1:
            raise ValueError(f"layers must have the same dim, got {sorted({layer.dim for layer in self.layers})}")
        if self.vocab < 1:
            raise ValueError(f"vocab must be positive, got {self.vocab}")

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.layers[0].dim

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """How many each layer has."""
        return tuple(block_parameters(layer) + self.other_per_layer for layer in self.layers)

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of the head where it is another matrix."""
        return self.vocab * self.dim * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """How many the model has in all, the last norm among them."""
        return sum(self.layer_parameters) + self.embedding_parameters + norm_parameters(self.layers[-1], self.dim)


def linear_shapes(spec: BlockSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each linear layer of a block, by the names of `TransformerBlock`'s children."""
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    gate = {"gate_proj": (spec.hidden_dim, spec.dim)} if spec.gated else {}
    return {
        "q_proj": (query, spec.dim), "k_proj": (key, spec.dim), "v_proj": (key, spec.dim), "out_proj": (spec.dim, query),
        **gate, "up_proj": (spec.hidden_dim, spec.dim), "down_proj": (spec.dim, spec.hidden_dim),
    }  # fmt: skip


def block_parameters(spec: BlockSpec) -> int:
    """How many parameters a `TransformerBlock` of `spec` has."""
    shapes = linear_shapes(spec)
    biased = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.qkv_bias), "out_proj": spec.out_bias,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), spec.mlp_bias),
    }  # fmt: skip
    matrices = sum(outputs * (inputs + biased[name]) for name, (outputs, inputs) in shapes.items())
    norms = 2 * norm_parameters(spec, spec.dim)
    if spec.qk_norm:
        norms += sum(norm_parameters(spec, width) for width in spec.qk_norm_widths)
    return matrices + norms + (spec.heads if spec.sinks else 0)


def norm_parameters(spec: BlockSpec, width: int) -> int:
    """Of a norm of the block's kind: a scale, and the shift of a LayerNorm."""
    return width * (2 if spec.norm == "layer" else 1)


def load(model: str | Path) -> ModelShape:
    """The shape of a model of `SHAPES` by its name, or of the one whose `config.json` lies in a directory.

    Raises ValueError for a name that is neither, or for a config without a needed entry, and NotImplementedError, naming what is
    supported, for a `model_type`, an activation or a type of layer that is not.
    """
    if str(model) in SHAPES:
        return from_config(SHAPES[str(model)], str(model))
    folder = Path(model)
    if folder.is_file() and folder.name == "config.json":
        folder = folder.parent
    if not (folder / "config.json").is_file():
        raise ValueError(f"model must be a directory with a config.json or one of {', '.join(sorted(SHAPES))}, got {str(model)!r}")
    config = json.loads((folder / "config.json").read_text())
    return from_config(config, folder.resolve().name)


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that the entries of a `config.json` describe. Raises as `load` does.

    An entry that is missing has the default of transformers' class for that `model_type`, where leaving it out is usual.
    """
    kind = config.get("model_type")
    read = _READERS.get(str(kind))
    if read is None:
        raise NotImplementedError(f"model_type {kind!r} is not supported, only {', '.join(sorted(_READERS))}")
    try:
        return read(config, name)
    except KeyError as error:
        raise ValueError(f"config.json must have the entry {error.args[0]!r}, got {', '.join(sorted(config))}") from None


_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh", "relu": "reglu"}


def _spec(config: Mapping[str, Any], **more: Any) -> BlockSpec:
    """What all the model types have in common, and `more`."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise NotImplementedError(f"hidden_act {activation!r} is not supported, only {', '.join(sorted(_ACTIVATIONS))}")
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    head_dim = more.pop("head_dim", None) or config.get("head_dim") or config["hidden_size"] // heads
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    base = BlockSpec(
        dim=config["hidden_size"], heads=heads, kv_heads=config.get("num_key_value_heads") or heads, head_dim=head_dim,
        hidden_dim=config["intermediate_size"], norm_eps=config.get("rms_norm_eps", 1e-6), activation=_ACTIVATIONS[activation],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 1e4))), rope_dim=int(head_dim * partial),
        attn_dropout=config.get("attention_dropout") or 0.0,
    )  # fmt: skip
    return replace(base, **more)


def _shape(config: Mapping[str, Any], name: str, layers: list[BlockSpec], *, tied: bool = False, **more: Any) -> ModelShape:
    return ModelShape(
        name, tuple(layers), config["vocab_size"], bool(config.get("tie_word_embeddings", tied)),
        config.get("max_position_embeddings"), **more,
    )


def _windows(config: Mapping[str, Any], default: Callable[[int], bool], window: int | None) -> list[int | None]:
    """The window of each layer: where `layer_types` says so, or else where `default` is true of its index."""
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if default(index) else "full_attention" for index in range(config["num_hidden_layers"])]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise NotImplementedError(f"layer_types {', '.join(sorted(unknown))} are not supported, only sliding_attention, full_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds[: config["num_hidden_layers"]]]


def _llama(config: Mapping[str, Any], name: str) -> ModelShape:
    bias = bool(config.get("attention_bias"))
    spec = _spec(config, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias")))
    return _shape(config, name, [spec] * config["num_hidden_layers"])


def _mistral(config: Mapping[str, Any], name: str) -> ModelShape:
    return _shape(config, name, [_spec(config, window=config.get("sliding_window", 4096))] * config["num_hidden_layers"])


def _qwen(config: Mapping[str, Any], name: str, **more: Any) -> ModelShape:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    windows = _windows(config, lambda index: window is not None and index >= first, window)
    return _shape(config, name, [_spec(config, window=each, **more) for each in windows])


def _qwen2(config: Mapping[str, Any], name: str) -> ModelShape:
    return _qwen(config, name, qkv_bias=True)


def _qwen3(config: Mapping[str, Any], name: str) -> ModelShape:
    bias = bool(config.get("attention_bias"))
    return _qwen(config, name, head_dim=config.get("head_dim", 128), qk_norm="head", qkv_bias=bias, out_bias=bias)


def _gemma2(config: Mapping[str, Any], name: str, **more: Any) -> ModelShape:
    bias = bool(config.get("attention_bias"))
    more = {
        "softcap": config.get("attn_logit_softcapping", 50.0), "head_dim": config.get("head_dim", 256), "norm_offset": 1.0,
        "attn_scale": config.get("query_pre_attn_scalar", 256) ** -0.5, "qkv_bias": bias, "out_bias": bias, **more,
    }  # fmt: skip
    windows = _windows(config, lambda index: index % 2 == 0, config.get("sliding_window", 4096))
    layers = [_spec({"hidden_activation": "gelu_pytorch_tanh", **config}, window=each, **more) for each in windows]
    softcap = config.get("final_logit_softcapping", 30.0)
    return _shape(config, name, layers, tied=True, softcap=softcap, other_per_layer=2 * config["hidden_size"])


def _gemma3(config: Mapping[str, Any], name: str) -> ModelShape:
    pattern = config.get("sliding_window_pattern", 6)
    kinds = ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(config["num_hidden_layers"])]
    defaults = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": kinds}
    return _gemma2({**defaults, **config}, name, qk_norm="head")


def _phi3(config: Mapping[str, Any], name: str) -> ModelShape:
    spec = _spec(config, window=config.get("sliding_window"), residual_dropout=config.get("resid_pdrop") or 0.0)
    return _shape(config, name, [spec] * config["num_hidden_layers"])


def _smollm3(config: Mapping[str, Any], name: str) -> ModelShape:
    interval, bias = config.get("no_rope_layer_interval", 4), bool(config.get("attention_bias"))
    turned = config.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(config["num_hidden_layers"])]
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    windows = _windows(config, lambda index: window is not None and not turned[index], window)
    spec = _spec({"rope_theta": 2e6, **config}, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias")))
    layers = [
        replace(spec, window=each, rope_theta=spec.rope_theta if turn else None) for each, turn in zip(windows, turned, strict=False)
    ]
    return _shape(config, name, layers, tied=True)


def _olmo2(config: Mapping[str, Any], name: str) -> ModelShape:
    bias = bool(config.get("attention_bias"))
    return _shape(config, name, [_spec(config, qk_norm="row", qkv_bias=bias, out_bias=bias)] * config["num_hidden_layers"])


_READERS: dict[str, Callable[[Mapping[str, Any], str], ModelShape]] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "gemma2": _gemma2, "gemma3_text": _gemma3, "phi3": _phi3,
    "smollm3": _smollm3, "olmo2": _olmo2,
}  # fmt: skip


def _public(sizes: tuple[int, int, int, int, int, int], vocab: int, max_length: int, **more: Any) -> dict[str, Any]:
    """The config.json of a public model: `(dim, hidden_dim, layers, heads, kv_heads, head_dim)` and what else it has of interest."""
    entries = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {**dict(zip(entries, sizes, strict=True)), "vocab_size": vocab, "max_position_embeddings": max_length, **more}


_LLAMA3: dict[str, Any] = {"model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 1e-5}
_QWEN3: dict[str, Any] = {"model_type": "qwen3", "rope_theta": 1e6}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _public((2048, 8192, 16, 32, 8, 64), 128256, 131072, **_LLAMA3, **_TIED),
    "llama-3.2-3b": _public((3072, 8192, 28, 24, 8, 128), 128256, 131072, **_LLAMA3, **_TIED),
    "llama-3.1-8b": _public((4096, 14336, 32, 32, 8, 128), 128256, 131072, **_LLAMA3),
    "llama-3.1-70b": _public((8192, 28672, 80, 64, 8, 128), 128256, 131072, **_LLAMA3),
    "qwen2.5-7b": _public((3584, 18944, 28, 28, 4, 128), 152064, 131072, model_type="qwen2", rope_theta=1e6),
    "qwen3-0.6b": _public((1024, 3072, 28, 16, 8, 128), 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-8b": _public((4096, 12288, 36, 32, 8, 128), 151936, 40960, **_QWEN3),
    "qwen3-32b": _public((5120, 25600, 64, 64, 8, 128), 151936, 40960, **_QWEN3),
    "mistral-7b": _public((4096, 14336, 32, 32, 8, 128), 32768, 32768, model_type="mistral", rope_theta=1e6, sliding_window=None),
    "gemma-2-2b": _public((2304, 9216, 26, 8, 4, 256), 256000, 8192, model_type="gemma2"),
    "gemma-2-9b": _public((3584, 14336, 42, 16, 8, 256), 256000, 8192, model_type="gemma2"),
    "smollm2-135m": _public((576, 1536, 30, 9, 3, 64), 49152, 8192, model_type="llama", rope_theta=1e5, rms_norm_eps=1e-5, **_TIED),
    "smollm3-3b": _public((2048, 11008, 36, 16, 4, 128), 128256, 65536, model_type="smollm3", rope_theta=5e6),
    "phi-3-mini": _public((3072, 8192, 32, 32, 32, 96), 32064, 4096, model_type="phi3", sliding_window=2047),
    "olmo-2-7b": _public((4096, 11008, 32, 32, 32, 128), 100352, 4096, model_type="olmo2", rope_theta=5e5),
}
"""Public models by name, as their config.json on the Hugging Face hub has them. "mistral-7b" is that of version 0.3."""
