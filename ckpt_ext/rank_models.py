"""For tests of sharded and tensor parallel training: small models in float64, their gradients in one process, and what a step did.

`fully_shard` is that of FSDP2; models of transformers are made where that is installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .integrations.swapping import swap as swap_layers
from .modules import EagerBlock, TransformerBlock
from .ranks import Collectives
from .spec import BlockSpec
from .training import LanguageModel
from .truth import Float64Throughout

WORLD, DIM, LENGTH, LAYERS = 2, 32, 9, 3
SPEC = BlockSpec(dim=DIM, heads=4, kv_heads=2, hidden_dim=44, rope_theta=1e4)
TOKENS: dict[str, Any] = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, tie_word_embeddings=False)
SIZES: dict[str, dict[str, Any]] = {
    "llama": dict(
        hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        max_position_embeddings=32, **TOKENS,
    ),
    "gpt2": dict(n_embd=DIM, n_layer=LAYERS, n_head=4, n_positions=32, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, **TOKENS),
}  # fmt: skip
FAMILIES = ("native", *SIZES)


def make(family: str, *, ours: bool, swap: bool = True) -> Any:
    """A model in float64 with parameters that are always the same: on the engine, or plain PyTorch's."""
    torch.manual_seed(0)
    if family == "native":
        blocks = [(TransformerBlock if ours else EagerBlock)(SPEC, dtype=torch.float64) for _ in range(LAYERS)]
        return LanguageModel(blocks, DIM, dtype=torch.float64, device=torch.device("cpu"))
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES[family])).double()
    if ours and swap:
        assert len(swap_layers(model).swapped) == LAYERS
    return model


def layers_of(model: Any) -> Any:
    """The list of its blocks, or layers."""
    if isinstance(model, LanguageModel):
        return model.blocks
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def per_block(model: Any, **arguments: Any) -> Any:
    """Each layer has a group of its own, and the rest the model's."""
    for layer in layers_of(model):
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def per_model(model: Any, **arguments: Any) -> Any:
    """One group."""
    return fully_shard(model, **arguments)


def nested(model: Any, **arguments: Any) -> Any:
    """Every module that is called and has blocks inside is sharded, too, and so is the head."""
    for layer in layers_of(model):
        fully_shard(layer, **arguments)
    if not isinstance(model, LanguageModel):
        fully_shard(model.base_model, **arguments)
    else:
        fully_shard(model.head, **arguments)
    return fully_shard(model, **arguments)


def batch(rank: int) -> Tensor:
    """Symbols `[2, LENGTH + 1]` of a rank."""
    return torch.randint(3, 64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(rank))


def loss(model: nn.Module, symbols: Tensor) -> Tensor:
    """The mean cross entropy of each next symbol."""
    out = model(symbols[:, :-1])
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


def truth(family: str) -> dict[str, Tensor]:
    """By name, the mean over the ranks of the gradients that each alone gets; plain PyTorch in float64 in one process."""
    model, sums = make(family, ours=False), dict[str, Any]()
    with Float64Throughout():
        for rank in range(WORLD):
            model.zero_grad()
            loss(model, batch(rank)).backward()
            for name, parameter in model.named_parameters():
                sums[name] = sums.get(name, 0) + gradient(parameter) / WORLD
    return sums


def gradient(parameter: Tensor) -> Any:
    """Of a parameter, that has one."""
    assert parameter.grad is not None
    return parameter.grad


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of a sharded model by name, without what wrappers put into names."""
    return {name.replace("_checkpoint_wrapped_module.", ""): gradient(p).full_tensor() for name, p in model.named_parameters()}


def check(model: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """Every parameter is sharded, and its gradient equals `expected` to 1e-9 of the largest of each."""
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    agree(whole_gradients(model), expected)


class Step(NamedTuple):
    """What one step did."""

    collectives: Counter[str]
    between: list[int]
    """Bytes of the storages of the parameters that each block ran with, after the forward pass."""
    after: list[int]
    """The same after backward."""


def step(model: nn.Module, rank: int) -> Step:
    """Forward and backward, with collectives counted and the storages of the layers' unsharded parameters looked at."""
    found: list[list[UntypedStorage]] = []
    handles = []
    for layer in layers_of(model):
        note = layer.register_forward_pre_hook(lambda layer, _: found.append([p.untyped_storage() for p in layer.parameters()]))
        handles.append(note)
    model.zero_grad()
    with Collectives() as collectives, Float64Throughout():
        value = loss(model, batch(rank))
        run = found[: len(handles)]
        between = [sum(storage.nbytes() for storage in layer) for layer in run]
        value.backward()
    for handle in handles:
        handle.remove()
    return Step(collectives.counts, between, [sum(storage.nbytes() for storage in layer) for layer in run])


def sharded(family: str, wrap: Callable[..., Any], *, ours: bool, **arguments: Any) -> Any:
    """The model, swapped where `ours`, sharded by `wrap`."""
    return wrap(make(family, ours=ours), **arguments)


def kept_bytes(model: nn.Module, rank: int) -> int:
    """Of the storages that a forward pass saves for backward, parameters and all. The backward pass is run, too."""
    sizes: dict[int, int] = {}
    alive = []

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        alive.append(storage)  # or another one could get its address
        sizes[storage._cdata] = storage.nbytes()
        return x

    model.zero_grad()
    with Float64Throughout(), saved_tensors_hooks(note, lambda x: x):
        value = loss(model, batch(rank))
    with Float64Throughout():
        value.backward()
    return sum(sizes.values())


def styles(columns: Iterable[str], rows: Iterable[str]) -> dict[str, ParallelStyle]:
    """Each linear by name a style of its own: one remembers what it is applied to."""
    return {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}


def cut(block: TransformerBlock, mesh: DeviceMesh) -> nn.Module:
    """The block, cut across the ranks of `mesh`, in place."""
    columns = [name for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") if getattr(block, name) is not None]
    return parallelize_module(block, mesh, styles(columns, ("out_proj", "down_proj")))


def whole(tensor: Any) -> Any:
    """A tensor, or all of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agree(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and each tensor equal to 1e-9 of the largest of the expected one."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        error, size = (tensor - expected[name]).abs().max().item(), expected[name].abs().max().item()
        assert error <= 1e-9 * size, f"{name}: {error:.3g} of {size:.3g}"
