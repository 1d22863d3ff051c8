"""The arguments of a layer's call: what a block takes from them, what it may leave aside, and what only the original forward honours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Names that a cache of keys and values has in supported versions of transformers."""
_LEFT_ASIDE = frozenset({
    "position_ids", "cache_position", "use_cache", "num_items_in_batch", "output_hidden_states", "return_dict", "labels",
    "encoder_attention_mask",
})  # fmt: skip
"""Arguments on which a layer's result does not depend: positions are in the table and the mask, the rest is for the model around it."""
_OF_FLASH = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Arguments that flash attention alone reads."""


class Arguments(NamedTuple):
    """A call's arguments by what they mean."""

    hidden: Any
    mask: Any
    table: Any
    positions: Tensor | None
    cache: Any
    unknown: dict[str, Any]
    """What the block does not know, and which asks for something."""


@lru_cache
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)


def bind(forward: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], *, table: str | None, flash: bool) -> Arguments:
    """`args` and `kwargs` of a layer's `forward`, less self, taken apart; `table` names the argument with cosines and sines.

    Raises TypeError where the forward could not be called with them.
    """
    bound = _signature(forward).bind(None, *args, **kwargs).arguments
    given = dict(bound)
    for parameter in _signature(forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    _, hidden, *_ = given.values()
    names = list(given)
    known = {names[0], names[1], "attention_mask", table, *CACHES}
    aside = _LEFT_ASIDE if flash else _LEFT_ASIDE | _OF_FLASH
    unknown = {name: value for name, value in given.items() if name not in known | aside and not _is_off(name, value)}
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    return Arguments(
        hidden, given.get("attention_mask"), None if table is None else given.get(table), given.get("position_ids"), cache, unknown
    )


def without_cache(forward: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], Any]:
    """The same arguments with None in the place of a cache, and the cache, or None where there is none."""
    places = {name: index for index, name in enumerate(list(_signature(forward).parameters)[1:])}
    bare, named, cache = list(args), dict(kwargs), None
    for name in CACHES:
        if named.get(name) is not None:
            cache, named[name] = named[name], None
        elif places.get(name, len(bare)) < len(bare) and bare[places[name]] is not None:
            cache, bare[places[name]] = bare[places[name]], None
    return bare, named, cache


def _is_off(name: str, value: Any) -> bool:
    """Whether an argument asks for nothing. False may: to a switch of outputs; `is_causal=False` does not."""
    return value is None or value is False and name.startswith("output_")


def has_past(cache: Any, layer_index: int | None) -> bool:
    """Whether a cache holds keys that the layer would attend to, as far as it can tell."""
    lengths = getattr(cache, "get_seq_length", None)
    if lengths is None:
        return True
    return bool(lengths() if layer_index is None else lengths(layer_index))
