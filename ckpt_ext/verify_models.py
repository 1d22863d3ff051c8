"""The models that `ckpt-ext verify` can be given, each with a batch: a Hugging Face directory, a tiny one by name, or a user's function."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import text
from .validate import positive_int

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
_DECODER = {**_WIDTHS, "num_key_value_heads": 2, "pad_token_id": 0}
_ALTERNATING = {**_DECODER, "head_dim": 16, "sliding_window": 16}
TINY: dict[str, dict[str, Any]] = {
    "llama": _DECODER, "mistral": {**_DECODER, "sliding_window": 16}, "qwen2": _DECODER, "qwen3": {**_DECODER, "head_dim": 16},
    "phi3": _DECODER, "smollm3": _DECODER, "olmo2": _DECODER, "gemma2": _ALTERNATING, "gemma3_text": _ALTERNATING,
    "gpt_neox": _WIDTHS, "bert": _WIDTHS, "vit": {**_WIDTHS, "image_size": 32, "patch_size": 8},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 256},
}  # fmt: skip
"""Configurations of small models by their `model_type`."""
_PREFIX = "tiny-"
_TASKS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel")


def names() -> list[str]:
    """Of the tiny models."""
    return [_PREFIX + kind for kind in TINY]


def load(name: str, *, batch: int, length: int, layers: int | None, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any]:
    """A model and a batch: of "module:function", which returns both; of a directory with a `config.json`, its weights where it has some,
    else drawn from `seed`; or of a tiny model's name. The second row of a batch of text is padded to the left.

    Raises ValueError for a name that is none of these, OSError for a directory that cannot be read.
    """
    torch.manual_seed(seed)
    if ":" in name and not Path(name).exists():
        module, _, function = name.partition(":")
        try:
            return getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"model must name a function that can be imported, got {name!r}: {error}") from error
    if Path(name).is_dir():
        model = _from_directory(Path(name), layers, dtype)
    elif name.removeprefix(_PREFIX) in TINY and name.startswith(_PREFIX):
        from transformers import AutoConfig

        kind = name.removeprefix(_PREFIX)
        sizes = TINY[kind]
        if layers is not None:
            positive_int("layers", layers)
            sizes = {**sizes, "n_layer" if "n_layer" in sizes else "num_hidden_layers": layers}
        config = AutoConfig.for_model(kind, **sizes)
        model = _from_config(config, dtype)
    else:
        raise ValueError(f"model must be a directory, module:function or one of {', '.join(names())}, got {name!r}")
    return model.train(), _batch(model.config, batch, length, seed, dtype)


def _from_directory(folder: Path, layers: int | None, dtype: torch.dtype) -> Any:
    import transformers

    config = _cut(transformers.AutoConfig.from_pretrained(folder), layers)
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    if not weights:
        return _from_config(config, dtype)
    known = [getattr(transformers, name, None) for name in config.architectures or ()]
    kind = next((cls for cls in known if cls is not None), transformers.AutoModel)
    return kind.from_pretrained(folder, config=config, dtype=dtype)


def _cut(config: PretrainedConfig, layers: int | None) -> PretrainedConfig:
    if layers is not None:
        if not 0 < layers <= config.num_hidden_layers:
            raise ValueError(f"layers must be at least 1 and at most the model's {config.num_hidden_layers}, got {layers}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def _from_config(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    import transformers

    for task in _TASKS:
        auto = getattr(transformers, task)
        if type(config) in auto._model_mapping:
            return auto.from_config(config).to(dtype)
    raise ValueError(f"model must be of a known kind, got {config.model_type!r}")


def _batch(config: Any, batch: int, length: int, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if hasattr(config, "image_size"):
        return {"pixel_values": torch.randn(batch, config.num_channels, config.image_size, config.image_size, dtype=dtype)}
    ids = text.batches(text.read(), 1, batch, length, seed)[0, :, :length] % config.vocab_size
    mask = torch.ones_like(ids)
    mask[1:2, : length // 4] = 0
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))  # a decoder must not predict the first token from padding
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask * before == 0, -100)}
