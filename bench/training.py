"""Training steps of a byte-level language model of a few Llama-8B layers, AdamW included: `python -m bench.training`.

The peak is beyond parameters, optimizer state and batch, gradients included.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import block, peers
from bench.clock import Work
from bench.harness import Case, Provider, main
from ckpt_ext import EagerBlock, Policy, TransformerBlock, text
from ckpt_ext.spec import BlockSpec
from ckpt_ext.training import LanguageModel


class Shape(NamedTuple):
    spec: BlockSpec
    layers: int
    length: int
    dtype: torch.dtype
    device: torch.device


def build(kind: type[TransformerBlock], shape: Shape, *, checkpointed: bool = False, **arguments) -> LanguageModel:
    """A model whose parameters depend on the shape alone."""
    with torch.random.fork_rng([shape.device] if shape.device.type == "cuda" else []):
        torch.manual_seed(0)
        blocks = [kind(shape.spec, dtype=shape.dtype, device=shape.device, **arguments) for _ in range(shape.layers)]
        return LanguageModel(blocks, shape.spec.dim, checkpointed=checkpointed, dtype=shape.dtype, device=shape.device)


def windows(shape: Shape) -> Tensor:
    """A batch of text, `[1, length + 1]`."""
    return text.batches(text.read(), 1, 1, shape.length, seed=0)[0].to(shape.device)


def stepped(model: nn.Module, loss: Callable[[Tensor], Tensor], batch: Tensor, names: Callable[[str], str] = str) -> Work:
    """A training step. Its results are the loss and the gradients, by the names of our model, before the step."""
    parameters = {names(name): parameter for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4, fused=batch.is_cuda)

    def step(_: None) -> dict[str, Tensor]:
        value = loss(batch)
        value.backward()
        optimizer.step()
        results = {"loss": value.detach(), **{name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}}
        optimizer.zero_grad(set_to_none=True)
        return results

    return Work(step, forward=lambda: loss(batch), ignored=[*parameters.values(), batch])


def written_out(dtype: torch.dtype, shape: Shape) -> dict[str, Tensor]:
    """The results of plain PyTorch in `dtype`, from the same parameters and batch."""
    model = build(EagerBlock, shape).to(dtype)
    return stepped(model, model.loss, windows(shape)).run(None)


def of_hugging_face(module: ModuleType, shape: Shape) -> Work:
    """transformers' Llama, its gradient checkpointing on, with the parameters and the loss of our model."""
    symbols = text.SYMBOLS
    model = peers.hugging_face_llama(module, build(EagerBlock, shape), shape.spec, symbols)
    names = peers.hugging_face_names(shape.layers)

    def loss(batch: Tensor) -> Tensor:
        logits = model(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    return stepped(model, loss, windows(shape), names.__getitem__)


def case(shape: Shape, check_shape: Shape) -> Case:
    """All ways to train the model at one length."""
    device = shape.device

    def of(kind: type[TransformerBlock], shape: Shape, **arguments) -> Work:
        model = build(kind, shape, **arguments)
        return stepped(model, model.loss, windows(shape))

    def ours(save: str) -> Provider:
        return peers.ours("auto", device, lambda shape: of(TransformerBlock, shape, policy=Policy(save)))

    transformers, reason = peers.importable("transformers")
    hugging_face = Provider(None, reason) if transformers is None else Provider(partial(of_hugging_face, transformers))
    flops = 3 * shape.layers * block.Shape(shape.spec, shape.length, shape.dtype, device).flops()
    return Case(
        f"training {shape.layers} layers dim {shape.spec.dim} / {shape.spec.hidden_dim} T={shape.length}", shape, check_shape,
        partial(written_out, torch.float64), partial(written_out, shape.dtype),
        {
            "torch checkpoint": Provider(lambda shape: of(EagerBlock, shape, checkpointed=True)),
            "ours: input": ours("input"),
            "ours: attention": ours("attention"),
            "HF Llama, checkpointing": hugging_face,
            "plain": Provider(lambda shape: of(EagerBlock, shape)),
            "ours: all": ours("all"),
        },
        block.TOLERANCE[shape.dtype], terms=max(shape.spec.hidden_dim, check_shape.length), flops=flops, tokens=shape.length,
    )  # fmt: skip


def cases(args: argparse.Namespace) -> list[Case]:
    """The lengths in the order given."""
    spec, layers, lengths, check = (block.SMALL, 2, [24], 20) if args.small else (block.LLAMA, args.layers, args.lengths, 512)
    shape = Shape(spec, layers, check, args.dtype, args.device)
    return [case(shape._replace(length=length), shape) for length in lengths]


if __name__ == "__main__":
    options = {
        "layers": {"type": int, "default": 2, "help": "transformer blocks"},
        "lengths": {"type": int, "nargs": "+", "default": [16384, 32768], "help": "tokens"},
    }
    sys.exit(main("training", "Training steps of a few Llama-8B layers.", cases, **options))
