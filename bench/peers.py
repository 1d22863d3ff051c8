"""Those we are compared with: PyTorch's own ways, and what others publish, each with the reason where it is not there.

Nothing here is imported from a package that may be missing before somebody asks whether it is.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.clock import Work
from bench.harness import Provider
from ckpt_ext import EagerBlock, reference, rope
from ckpt_ext.backends import interpreting, select
from ckpt_ext.spec import BackendName

SDPA_OPERATORS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
"""What selective checkpointing saves when it saves attention."""


def importable(name: str) -> tuple[ModuleType | None, str]:
    """The module, or None and why it is not there."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # packages that look for a GPU as they are imported raise anything
        return None, f"{name.partition('.')[0]} cannot be imported: {error}".splitlines()[0]


def ours(backend: BackendName, device: torch.device, prepare: Callable[[Any], Work]) -> Provider:
    """One of our own, on `backend`."""
    try:
        select(backend, device)
    except RuntimeError as error:
        return Provider(None, str(error), ours=True)
    return Provider(prepare, ours=True)


def backend_for(device: torch.device) -> BackendName:
    """Triton wherever it runs, under its interpreter too."""
    return "triton" if device.type == "cuda" or interpreting() else "aten"


def liger(device: torch.device, prepare: Callable[[ModuleType, Any], Work], module: str = "liger_kernel.ops") -> Provider:
    """Liger-Kernel's, prepared from its `module`."""
    found, reason = importable(module)
    if found is not None and device.type == "cpu":
        found, reason = None, "Liger's kernels need a GPU; Triton's interpreter does not run them"
    return Provider(None, reason) if found is None else Provider(partial(prepare, found))


def compiled(function: Callable, device: torch.device, *, dynamic: bool = False) -> Callable:
    """`torch.compile`d; on a CPU without code generation, which takes half a minute there and says nothing about a GPU."""
    # Each shape is a compilation of its own; past the limit, the function would run uncompiled and unnoticed.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, backend="inductor" if device.type == "cuda" else "aot_eager", dynamic=dynamic)


def sdpa(backend: SDPBackend | None, *, causal: bool, grouped: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`scaled_dot_product_attention` by one of its backends, or by the one that it picks."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return attention


def flex(device: torch.device, length: int, *, causal: bool, grouped: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention, compiled, with a mask that skips what a causal one hides."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length, device=str(device)) if causal else None
    function = compiled(flex_attention, device)
    return lambda q, k, v: function(q, k, v, block_mask=mask, enable_gqa=grouped)


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Non-reentrant `torch.utils.checkpoint`."""
    return checkpoint(block, x, use_reentrant=False)


def attention_saved(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Selective checkpointing that keeps attention's results and runs all else again."""
    operators = [getattr(torch.ops.aten, name).default for name in SDPA_OPERATORS if hasattr(torch.ops.aten, name)]
    context = partial(create_selective_checkpoint_contexts, operators)
    return checkpoint(block, x, use_reentrant=False, context_fn=context)


class TiledBlock(nn.Module):
    """An `EagerBlock`'s parameters, its MLP run by Liger's `LigerTiledSwiGLUMLP`: tile by tile, each tile's forward again in backward."""

    def __init__(self, transformers: ModuleType, block: EagerBlock) -> None:
        super().__init__()
        spec = block.spec
        with torch.device("meta"):
            mlp = transformers.LigerTiledSwiGLUMLP(SimpleNamespace(hidden_size=spec.dim, intermediate_size=spec.hidden_dim))
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = block.gate_proj, block.up_proj, block.down_proj
        self.block, self.mlp = block, mlp

    def forward(self, x: Tensor) -> Tensor:
        block, spec = self.block, self.block.spec
        table = rope.table(spec, x.size(1), x.dtype, x.device)
        rows = _rms_norm(block.attention_norm, x)
        q, k, v = (
            projection(rows).unflatten(-1, (-1, spec.head_dim)).transpose(1, 2) for projection in (block.q_proj, block.k_proj, block.v_proj)
        )
        q, k = reference.rotate(q, *table), reference.rotate(k, *table)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, enable_gqa=spec.heads != spec.kv_heads)
        mid = x + block.out_proj(out.transpose(1, 2).flatten(2))
        return mid + self.mlp(_rms_norm(block.mlp_norm, mid))


def _rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), norm.weight, norm.eps)


def hugging_face_names(layers: int) -> dict[str, str]:
    """Our language model's parameter names by those of transformers' `LlamaForCausalLM`."""
    parts = {
        "input_layernorm": "attention_norm", "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "out_proj", "post_attention_layernorm": "mlp_norm", "mlp.gate_proj": "gate_proj", "mlp.up_proj": "up_proj",
        "mlp.down_proj": "down_proj",
    }  # fmt: skip
    names = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
    names |= {f"model.layers.{i}.{theirs}": f"blocks.{i}.{own}" for i in range(layers) for theirs, own in parts.items()}
    return {f"{theirs}.weight": f"{own}.weight" for theirs, own in names.items()}


def hugging_face_llama(transformers: ModuleType, model: nn.Module, spec, vocabulary: int) -> nn.Module:
    """transformers' Llama with the parameters of our language model `model`, and its gradient checkpointing on."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=spec.dim, intermediate_size=spec.hidden_dim, num_hidden_layers=len(model.blocks),
        num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads, rms_norm_eps=spec.norm_eps, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta}, attn_implementation="sdpa", use_cache=False,
        max_position_embeddings=2**20,
    )  # fmt: skip
    weight = model.head.weight
    with weight.device:
        theirs = transformers.LlamaForCausalLM(config).to(weight.dtype)
    parameters = model.state_dict()
    theirs.load_state_dict({name: parameters[own] for name, own in hugging_face_names(len(model.blocks)).items()})
    # The older name is on its way out, the newer one is not there yet in all versions.
    enable = getattr(theirs, "activation_checkpointing_enable", theirs.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    return theirs.train()
