"""What `fit` says of training runs that others have published: Llama-8B on one H200, by the recipes of Arctic Long Sequence Training.

The recipes (arXiv:2506.13996; ArcticTraining, projects/sequence-parallelism/run-h200-sp1-llama-8b*.yml) have DeepSpeed's ZeRO-3 with
optimizer and parameters in the host's memory, FlashAttention 3, and gradient checkpointing, which ArcticTraining switches on by default,
hence in the first, too. Each names the longest sequence, and the memory that a monitor showed. What is unknown here: what DeepSpeed's
buffers take beyond the gathered parameters that are counted, and what the card holds beside tensors. Liger's kernels for norms and SwiGLU,
in all but the first, take less than the Hugging Face layer that is counted. The tiled MLP of the last has no counterpart in the count.
"""

from __future__ import annotations

from typing import NamedTuple

from .budget import Training
from .fit import Method, Search, estimate, fit
from .shapes import load
from .spec import Policy

MEMORY = 140 * 2**30
"""Bytes of an H200, about."""
TRAINING = Training("offloaded", offload_weights=True)


class Recipe(NamedTuple):
    """A published run."""

    name: str
    published: int
    """Tokens."""
    published_peak: float
    """GiB, as its file notes."""
    method: Method | None
    """What comes nearest to it here."""


RECIPES = (
    Recipe("torch checkpoint", 65_000, 137.36, Method("torch checkpoint", "torch checkpoint", loss="logits")),
    Recipe("with Liger's kernels", 300_000, 134.96, Method("torch checkpoint, loss without logits", "torch checkpoint")),
    Recipe(
        "with checkpoints in the host's memory", 650_000, 126.81,
        Method("torch checkpoint, loss without logits, offload", "torch checkpoint", Policy(offload=True)),
    ),
    Recipe("with a tiled MLP", 1_200_000, 136.15, None),
)  # fmt: skip
OURS = Method("ours: input, offload", policy=Policy(offload=True))


class Rung(NamedTuple):
    """A published run beside what is counted."""

    name: str
    published: int
    published_gib: float
    found: int | None
    """Tokens, by the nearest method, without any reserve; None where there is none."""
    counted_gib: float | None
    """At the published length."""


def ladder() -> list[Rung]:
    """The published runs, and last our blocks with offload, which have no published length: 0."""
    shape, search = load("llama-3.1-8b"), Search(reserve=0)
    rungs = []
    for recipe in (*RECIPES, Recipe(OURS.name, 0, 0.0, OURS)):
        found = counted = None
        if recipe.method is not None:
            found = fit(shape, [MEMORY], [TRAINING], search, methods=[recipe.method]).cells[0].found
            counted = estimate(shape, recipe.method, TRAINING, 1, recipe.published or found).peak / 2**30
        rungs.append(Rung(recipe.name, recipe.published, recipe.published_peak, found, counted))
    return rungs
