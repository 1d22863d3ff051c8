"""A layer of transformers that runs as a block: a subclass of its class, so that everything but the forward pass stays what it was."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import adopt, functional, recomputed
from ..checkpoint import checkpoint
from ..spec import BackendName, Policy
from . import arguments, model_masks, parts, sharded
from .adapters import AdapterStates
from .chain import Link, passed, place_of
from .decoders import DECODERS
from .encoders import ENCODERS
from .family import Family

Fallback = Literal["checkpoint", "none"]
STATE = "_ckpt_ext"

FAMILIES: dict[str, Family] = {family.path: family for family in (*DECODERS, *ENCODERS)}
"""The table of each layer class that can be a block, by the class's full name."""


@dataclass
class State:
    """What a swapped layer knows beyond its parameters: plain data, so that it is copied and pickled with the layer."""

    name: str
    policy: Policy
    backend: BackendName
    fallback: Fallback
    refused: str | None = None
    """Why the layer was no block when it was swapped; it goes through the fallback then."""
    link: Link | None = None
    """Where the layer stands among the model's, if those are cut into segments."""
    noticed: set[str] = field(default_factory=set)
    """What has been warned of; one set for all layers of a swap."""

    def notice(self, message: str) -> None:
        """Warn, once a swap."""
        if message not in self.noticed:
            self.noticed.add(message)
            warnings.warn(f"{self.name or 'layer'} and its like: {message}", stacklevel=2)


@functools.cache
def swapped_class(original: type[Any]) -> type[nn.Module]:
    """The subclass of `original` whose instances run as blocks; below what `fully_shard` made of it, where it did."""
    own = sharded.own_class(original)
    if own is not original:
        mixin, base = original.__bases__
        return sharded.remade(original, (mixin, swapped_class(base)), _ckpt_ext_original=original)

    @functools.wraps(original.forward)
    def forward(self, *args, **kwargs):
        return _run(self, original, args, kwargs)

    def reduce(self, protocol):
        made = original.__reduce_ex__(self, protocol)
        # A class made at run time cannot be found by name; a class made of it, as FSDP's, is its maker's to pickle.
        return (_remake, (original,), *made[2:]) if type(self) is made_class else made

    # The layer's own switch, stored but not read by the library: it would checkpoint a second time what keeps only its input anyway.
    switch = property(lambda self: False, lambda self, value: self.__dict__.__setitem__("gradient_checkpointing", value))
    body = {
        "__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__,
        "__reduce_ex__": reduce, "gradient_checkpointing": switch, "_ckpt_ext_original": original,
    }  # fmt: skip
    made_class: Any = type(original.__name__, (original,), body)
    made_class.forward = forward  # set afterwards: the library wraps what it finds when a class is made
    return made_class


def _remake(original: Any) -> nn.Module:
    kind = swapped_class(original)
    return kind.__new__(kind)


def original_class(layer: nn.Module) -> type[nn.Module]:
    """The class that a layer goes back to: the one before the swap. Where another was made of ours since, as FSDP's, that of the former."""
    kind: Any = type(layer)
    return _without_ours(kind)


@functools.cache
def _without_ours(kind: type[Any]) -> type[Any]:
    if (original := vars(kind).get("_ckpt_ext_original")) is not None:
        return original
    if not hasattr(kind, "_ckpt_ext_original"):
        return kind
    return sharded.remade(kind, tuple(map(_without_ours, kind.__bases__)))


def family_of(layer: nn.Module) -> Family | None:
    """The table of a layer's class, swapped or not, sharded or not."""
    return FAMILIES.get(parts.class_path(own_class(layer)))


def own_class(layer: nn.Module) -> type[nn.Module]:
    """The class that defines a layer, swapped or not, sharded or not."""
    return sharded.own_class(getattr(type(layer), "_ckpt_ext_original", type(layer)))


def _run(layer: nn.Module, original: type[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not torch.is_grad_enabled() or not _is_differentiated(layer, args, kwargs):
        return original.forward(layer, *args, **kwargs)
    state: State = getattr(layer, STATE)
    family = family_of(layer)
    if state.refused is not None or family is None:
        return _fall_back(layer, original, state, args, kwargs)
    try:
        parts.own_forward("the layer", original)
        adopt.no_hooks_on_all_modules()
        attention = family.child(layer, family.attention)
        implementation = attention.config._attn_implementation
        call = arguments.bind(original.forward, args, kwargs, table=family.table, flash=implementation in model_masks.FLASH)
        if _records_attentions() or call.unknown.get("output_attentions"):
            state.notice("output_attentions=True asks for attention weights, which blocks do not make: the original forward runs, all kept")
            return original.forward(layer, *args, **kwargs)
        if call.unknown:
            raise NotImplementedError(f"arguments must be those of a block, got {', '.join(call.unknown)}")
        if call.cache is not None:
            if arguments.has_past(call.cache, getattr(attention, "layer_idx", None)):
                state.notice("a cache with past keys came with gradients on: the original forward runs, all kept")
                return original.forward(layer, *args, **kwargs)
            state.notice("a cache came with gradients on and stays empty; set use_cache=False in training")
        return _block(layer, family, state, call, implementation)
    except parts.OneCall as error:
        state.notice(f"no block in this call, since {error}: the original forward runs, all kept")
        return original.forward(layer, *args, **kwargs)
    except NotImplementedError as error:
        state.notice(f"no block in this call, since {error}")
        return _fall_back(layer, original, state, args, kwargs)


def _block(layer: nn.Module, family: Family, state: State, call: arguments.Arguments, implementation: str) -> Tensor:
    family.check(layer)
    causal, window = family.position(layer)
    hidden, table, half = call.hidden, None, 0
    if family.rotates(layer):
        if not isinstance(call.table, tuple) or len(call.table) != 2:
            raise NotImplementedError(f"{family.table} must be a pair of cosines and sines, got {type(call.table).__name__}")
        if any(part.requires_grad for part in call.table):
            raise NotImplementedError(f"{family.table} must not require grad, got one that does: blocks have no gradient of it")
        half = call.table[0].size(-1) // 2
        table = call.table[0][..., :half], call.table[1][..., :half]
    reading = model_masks.read(
        call.mask, call.positions, implementation=implementation, causal=causal, window=window, batch=hidden.size(0), length=hidden.size(1)
    )
    spec = family.spec(layer, reading.causal, reading.window, 2 * half)
    weights = family.weights(layer, spec)
    if recomputed.in_reentrant() and functional.draws(weights, spec):
        # The forward pass ran without gradients, hence as the original, with the original's masks.
        recomputed.check_reentrant()
        raise parts.OneCall("dropout is on in a reentrant checkpoint")
    # A graph cannot hold what forward notes down for backward.
    link = None if torch.compiler.is_compiling() else state.link
    trained = any(parameter.requires_grad for parameter in layer.parameters())
    called = place_of(link, hidden, spec, trained=trained)
    if called.is_cut_off and sharded.is_sharded(layer):
        state.notice(
            "segments save nothing where each layer is sharded by itself, since it is handed a tensor of its own, and the parameters of "
            "those before it are gone when it could be rebuilt: shard several layers as one, or leave segments out"
        )
    y = functional.block(
        hidden, weights, spec, mask=reading.mask, table=table, policy=state.policy, backend=state.backend,
        training=True,  # the spec's probabilities are those of children in training
        place=called.place,
    )  # fmt: skip
    passed(link, called, y)
    return y


def _fall_back(layer: nn.Module, original: type[nn.Module], state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The original forward, checkpointed where the fallback or the library's own switch says so, and where no cache is written to."""
    bare_args, bare_kwargs, cache = arguments.without_cache(original.forward, args, kwargs)
    if cache is not None:
        if arguments.has_past(cache, None):
            return original.forward(layer, *args, **kwargs)
        state.notice("a cache came with gradients on and stays empty; set use_cache=False in training")
    if parts.has_hooks_of_one_call(layer):
        return original.forward(layer, *args, **kwargs)
    if state.fallback == "checkpoint" or (layer.training and layer.__dict__.get("gradient_checkpointing")):
        function: Callable[..., Any] = _Replayed(original, AdapterStates.of(layer)).forward
        return checkpoint(function, layer, *bare_args, **bare_kwargs)
    return original.forward(layer, *bare_args, **bare_kwargs)


class _Replayed(NamedTuple):
    """A layer's original forward, with the adapters of the first time."""

    original: type[nn.Module]
    adapters: AdapterStates

    def forward(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.adapters.again():
            return self.original.forward(layer, *args, **kwargs)


def _is_differentiated(layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    def tensors() -> Iterator[Tensor]:
        yield from (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        yield from layer.parameters()

    return any(tensor.requires_grad for tensor in tensors())


def _records_attentions() -> bool:
    """Whether the model around was asked for attention weights."""
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get()
    return bool(collected) and any("attentions" in key for key in collected)
