"""Models to train on several ranks: who runs their layers, and how they are laid out across the ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

import ckpt_ext
from bench import peers, training
from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, verify_models
from ckpt_ext.text import SYMBOLS

WAYS = NOTHING, TORCH, OURS = "nothing", "torch checkpoint", "ours"
NATIVE = "native"


@dataclass
class Subject:
    """A model of symbols `[B, T]` to logits `[B, T, vocabulary]`, and the names of its layers, outermost modules of equal kind."""

    model: nn.Module
    layers: list[str]

    def each(self, change: Callable[[nn.Module], nn.Module]) -> Subject:
        """`change` every layer; what it returns takes the layer's place."""
        for name in self.layers:
            self.model.set_submodule(name, change(self.model.get_submodule(name)))
        return self


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of predicting each symbol of `windows [B, T + 1]` but the first; `model` may be wrapped."""
    out = model(windows[:, :-1])
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def native(way: str, options: argparse.Namespace, mesh: DeviceMesh | None) -> Subject:
    """Our language model; where it is cut and not on our engine, transformers' Llama with its parameters, since `EagerBlock` is whole."""
    spec = BlockSpec(options.dim, options.heads, options.hidden_dim, kv_heads=options.kv_heads, rope_theta=1e4)
    shape = training.Shape(spec, options.layers, options.length, options.dtype, options.device)
    if way == OURS:
        model: nn.Module = training.build(TransformerBlock, shape, policy=Policy("input"))
    else:
        model = training.build(EagerBlock, shape)
        if mesh is not None:
            import transformers

            model = peers.hugging_face_llama(transformers, model, spec, SYMBOLS)
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()  # type: ignore[operator]
            return Subject(model, [f"model.layers.{index}" for index in range(options.layers)])
    return Subject(model, [f"blocks.{index}" for index in range(options.layers)])


def hugging_face(options: argparse.Namespace) -> Subject:
    """A language model of transformers, as `ckpt-ext verify` takes it; its layers are those that can be swapped."""
    model, batch = verify_models.load(options.model, batch=1, length=2, layers=options.layers, dtype=options.dtype, seed=0)
    if not isinstance(batch, dict) or "input_ids" not in batch or not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"model must be a language model of transformers, got {options.model!r}")
    model.config.use_cache = False  # type: ignore[union-attr]
    model = model.to(options.device)
    layers = ckpt_ext.swap(model).swapped
    ckpt_ext.unswap(model)
    return Subject(model, layers)


def cut(layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A native block or a Llama layer cut across `mesh`, by the plan with the fewest collectives; each module has a style of its own.

    Raises NotImplementedError for other layers.
    """
    if isinstance(layer, TransformerBlock):
        columns, rows = [f"{name}_proj" for name in ("q", "k", "v", "gate", "up")], ["out_proj", "down_proj"]
        inputs: dict[str, ParallelStyle] = {}
    else:
        columns = [*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
        rows = ["self_attn.o_proj", "mlp.down_proj"]
        whole = partial(PrepareModuleInput, use_local_output=False)
        states: dict[str, Placement] = {"hidden_states": Replicate()}
        inputs = {
            "self_attn": whole(input_kwarg_layouts=states, desired_input_kwarg_layouts=states),
            "mlp": whole(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        }
        names = {name for name, _ in layer.named_modules()}
        if not names.issuperset([*columns, *rows]):
            raise NotImplementedError(f"tensor parallel layers must have {', '.join([*columns, *rows])}, got {type(layer).__name__}")
    head_dim = layer.spec.head_dim if isinstance(layer, TransformerBlock) else layer.self_attn.head_dim  # type: ignore[union-attr]
    kv_heads = layer.get_submodule(columns[1]).weight.size(0) // head_dim  # type: ignore[operator]
    if kv_heads % mesh.size():
        raise NotImplementedError(f"kv_heads must be a multiple of the {mesh.size()} ranks that a layer is cut across, got {kv_heads}")
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    return parallelize_module(layer, mesh, styles | {name: RowwiseParallel() for name in rows} | inputs)


def made(way: str, options: argparse.Namespace, mesh: DeviceMesh | None) -> Subject:
    """The model with its layers run in `way`, cut across `mesh` where there is one; its parameters are those of any other way.

    Raises NotImplementedError where a layer cannot be cut or, in our way, swapped.
    """
    subject = native(way, options, mesh) if options.model == NATIVE else hugging_face(options)
    if mesh is not None:
        subject.each(lambda layer: cut(layer, mesh))
    if way == TORCH:
        subject.each(checkpoint_wrapper)
    if way == OURS and options.model != NATIVE:
        report = ckpt_ext.swap(subject.model, Policy("input"))
        if report.refused:
            raise NotImplementedError(f"every layer must be swapped, got {report.refused}")
    return subject


@dataclass(frozen=True)
class Layout:
    """How a model lies across the ranks of a mesh of `shape`, dimensions by name; data differs along "data", and "copies"."""

    name: str
    wrap: Callable[[Subject, DeviceMesh, argparse.Namespace], nn.Module]
    dimensions: tuple[str, ...] = ("data",)

    def mesh(self, device: str, world: int) -> DeviceMesh:
        """All ranks; in two dimensions, two along the second. Raises NotImplementedError where that would leave one along the first."""
        if len(self.dimensions) > 1 and (world < 4 or world % 2):
            raise NotImplementedError(f"{self.name} must have an even number of ranks, 4 or more, got {world}")
        shape = (world,) if len(self.dimensions) == 1 else (world // 2, 2)
        return init_device_mesh(device, shape, mesh_dim_names=self.dimensions)

    def build(self, way: str, options: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
        """The model across the ranks."""
        subject = made(way, options, mesh["tensor"] if "tensor" in self.dimensions else None)
        return self.wrap(subject, mesh, options)

    def share(self, mesh: DeviceMesh) -> int:
        """Which share of the data is this rank's."""
        tensor = mesh["tensor"].size() if "tensor" in self.dimensions else 1
        return mesh.get_rank() // tensor

    def shares(self, mesh: DeviceMesh) -> int:
        """In how many shares the data is."""
        return mesh.size() // (mesh["tensor"].size() if "tensor" in self.dimensions else 1)


def _replicated(subject: Subject, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    return DistributedDataParallel(subject.model, bucket_cap_mb=options.bucket_mib)


def _per_block(reshard: bool, subject: Subject, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    across = mesh["data"] if "tensor" in (mesh.mesh_dim_names or ()) else mesh
    subject.each(lambda layer: _sharded(layer, across, reshard))
    return _sharded(subject.model, across, reshard)


def _sharded(module: nn.Module, mesh: DeviceMesh, reshard: bool | None) -> nn.Module:
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return module


def _per_model(subject: Subject, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    return _sharded(subject.model, mesh, None)


def _as_it_is(subject: Subject, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    return subject.model


LAYOUTS = (
    Layout("DDP", _replicated),
    Layout("FSDP2 per block", partial(_per_block, True)),
    Layout("FSDP2 per block, not resharded after forward", partial(_per_block, False)),
    Layout("FSDP2 per model", _per_model),
    Layout("HSDP per block", partial(_per_block, True), ("copies", "data")),
    Layout("TP", _as_it_is, ("tensor",)),
    Layout("FSDP2 per block x TP", partial(_per_block, True), ("data", "tensor")),
)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; parameters that lie across different ranks go into groups of their own, since one call cannot take both."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-3)
