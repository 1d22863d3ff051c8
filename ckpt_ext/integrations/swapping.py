"""Swaps the layers of a model for blocks that keep only their input, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from torch import nn

from ..backends import select
from ..modules import EagerBlock, TransformerBlock
from ..plan import Plan
from ..spec import BackendName, Policy
from ..validate import instance, one_of
from . import parts, sharded
from .chain import Link, Segments, links
from .layer import FAMILIES, STATE, Fallback, State, family_of, original_class, own_class, swapped_class
from .report import SwapReport

SUPPORTED = ((5, 17), (5, 24))
"""The versions of transformers, from and to, whose layers the tables describe."""


def swap(
    model: nn.Module, policy: Policy | Plan | None = None, *, segments: Segments = None, backend: BackendName = "auto",
    fallback: Fallback = "checkpoint",
) -> SwapReport:  # fmt: skip
    """Make the layers of `model` run as blocks that keep what `policy` says, wherever gradients are on; the model is changed in place.

    Parameters, their names, hooks on the layers, the config and what optimizers hold stay as they are; without gradients (`no_grad`,
    `generate`) the original forward runs. `model` is a model of transformers, PEFT's around one, or any module that contains such layers
    or `TransformerBlock`s, which take the policy. Swapping again sets the policy anew.

    `segments` are those of `checkpoint_sequential`, of the layers that are swapped: their number, their lengths or "auto". A layer that is
    not given the output of the one before as it was begins a segment of its own. `policy` may be a `ckpt_ext.plan.Plan`, which has both.

    Layers that are no blocks, or are more than their class, are refused by name in the report: with `fallback="checkpoint"` their
    original forward runs inside `ckpt_ext.checkpoint`, with "none" they stay as they were. A layer that becomes more than its class
    later (a hook, another child) warns, and does the same.

    Raises NotImplementedError for a version of transformers outside of the supported range, ValueError for a model without such layers, for
    segments or a plan that do not fit them, and RuntimeError for a backend that cannot run.
    """
    instance("model", model, nn.Module)
    policy = policy or Policy()
    if not isinstance(policy, Plan):
        instance("policy", policy, Policy)
    one_of("backend", backend, get_args(BackendName))
    one_of("fallback", fallback, get_args(Fallback))
    _check_version()
    report, noticed = SwapReport(fallback=fallback), set[str]()
    layers = dict(_layers(model))
    if not layers:
        known = ", ".join(family.layer for family in FAMILIES.values())
        raise ValueError(f"model must contain layers that can be swapped ({known}), got {type(model).__name__} without any")
    for layer in layers.values():
        for parameter in layer.parameters():
            select(backend, parameter.device)
            break
    reasons = {name: None if isinstance(layer, TransformerBlock) else _refusal(layer) for name, layer in layers.items()}
    places = _places({name: layers[name] for name, reason in reasons.items() if reason is None}, policy, segments)
    for name, layer in layers.items():
        reason = reasons[name]
        if reason is None:
            report.swapped.append(name)
        else:
            report.refused[name] = reason
        layer_policy, link = places.get(name, (Policy(), None))
        if isinstance(layer, TransformerBlock):
            layer.policy, layer.backend = layer_policy, backend
            continue
        _restore(layer)
        if reason is None or fallback == "checkpoint" and not _has_own_forward(layer):
            setattr(layer, STATE, State(name, layer_policy, backend, fallback, reason, link, noticed))
            kind: Any = type(layer)
            layer.__class__ = swapped_class(kind)
    return report


def _places(layers: dict[str, nn.Module], policy: Policy | Plan, segments: Segments) -> dict[str, tuple[Policy, Link | None]]:
    """What each layer that is swapped keeps, and where it stands in its segments."""
    policies: Sequence[Policy]
    cut: Segments
    if isinstance(policy, Plan):
        if segments is not None:
            raise ValueError(f"segments must be None where a plan has them, got {segments!r}")
        if len(policy.blocks) != len(layers):
            raise ValueError(f"policy must be a plan for the {len(layers)} layers that are swapped, got one for {len(policy.blocks)}")
        policies, cut = policy.policies, policy.segments if any(length > 1 for length in policy.segments) else None
    else:
        policies, cut = [policy] * len(layers), segments
        if cut is not None and policy.save != "input":
            raise ValueError(f"policy must keep a layer's input alone in segments, got save={policy.save!r}")
    if cut is not None and any(isinstance(layer, TransformerBlock) for layer in layers.values()):
        raise ValueError("segments must be None for a model of TransformerBlocks: they are checkpoint_sequential's to run")
    return dict(zip(layers, zip(policies, links(len(layers), cut), strict=True), strict=True))


def unswap(model: nn.Module) -> None:
    """Give the layers of `model` their own forward back. `TransformerBlock`s keep the policy that they have."""
    instance("model", model, nn.Module)
    for layer in model.modules():
        _restore(layer)


def _restore(layer: nn.Module) -> None:
    if STATE in layer.__dict__:
        layer.__class__ = original_class(layer)
        delattr(layer, STATE)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are layers: ours, those with a table, and others that transformers would checkpoint."""
    library = sys.modules.get("transformers.modeling_layers")
    kinds = (TransformerBlock,) if library is None else (TransformerBlock, library.GradientCheckpointingLayer)
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, kinds) and not isinstance(module, EagerBlock) and not name.startswith(inside):
            inside = (*inside, f"{name}." if name else "")
            yield name, module


def _refusal(layer: nn.Module) -> str | None:
    """Why a layer is no block, or None where it is one."""
    family = family_of(layer)
    if family is None:
        return f"{own_class(layer).__name__} has no table"
    if _has_own_forward(layer):
        return "it has a forward of its own, which would be skipped"
    try:
        parts.own_forward("the layer", own_class(layer))
        family.check(layer)
        with sharded.whole(layer) as known:
            spec = family.spec(layer, *family.position(layer))
            if known:
                family.weights(layer, spec)
    except NotImplementedError as error:
        return f"{error}: swap before sharding" if sharded.has_pieces(layer) else str(error)
    return None


def _has_own_forward(layer: nn.Module) -> bool:
    return "forward" in layer.__dict__


def _check_version() -> None:
    """Refuse a version of transformers whose layers may be other ones."""
    library = sys.modules.get("transformers")
    if library is None:
        return
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    if not SUPPORTED[0] <= version <= SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise NotImplementedError(f"transformers must be {low} to {high} for its layers to be swapped, got {library.__version__}")
