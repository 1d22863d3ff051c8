"""The MLP half of a block, `y = mid + drop(mlp(norm(mid)))` with `mlp(n) = down(drop(f(gate(n)) * up(n)))`, forward and backward on
plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from .backends import Backend
from .call import BlockCall, Gradients, flat
from .projections import Projection
from .rng import Dropout
from .sites import BlockDropout
from .spec import pointwise
from .weights import BlockWeights

INTERNALS = ("normed", "stats", "up", "gate")
"""What lies between mid and the hidden layer: the normed rows and their statistics, and the projections' outputs.

The hidden layer itself is never kept: the kernel that differentiates the activation makes it again on the way.
"""

PLAIN_INTERNALS = INTERNALS[:3]
"""The same of a plain MLP, which has no gate."""


class MlpWeights(Protocol):
    """The projections of an MLP; `gate` is None in a plain one."""

    @property
    def gate(self) -> Projection | None: ...
    @property
    def up(self) -> Projection: ...
    @property
    def down(self) -> Projection: ...


def forward(
    call: BlockCall, weights: BlockWeights, mid: Tensor, dropout: BlockDropout
) -> tuple[Tensor, dict[str, Tensor]]:
    """The block's output and the internals by name."""
    internals = rebuild(call, weights, mid)
    hidden = call.backend.activation(internals.get("gate"), internals["up"], pointwise(call.spec.activation), dropout.mlp)
    branch = weights.down(hidden).view(mid.shape)
    return call.backend.dropout_add(branch, mid, dropout.mlp_residual), internals


def rebuild(call: BlockCall, weights: BlockWeights, mid: Tensor) -> dict[str, Tensor]:
    """The internals by name: all of the forward pass that backward needs, so without the activation and the down projection."""
    normed, stats = call.backend.norm(mid, *weights.mlp_norm, call.norm)
    normed = flat(normed).to(call.dtype)
    internals = {"normed": normed, "stats": stats, "up": weights.up(normed)}
    if weights.gate is not None:
        internals["gate"] = weights.gate(normed)
    return internals


def backward(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_mid: bool, grad_y: Tensor, mid: Tensor,
    internals: dict[str, Tensor], dropout: BlockDropout,
) -> tuple[Tensor | None, Gradients]:
    """Gradients of mid (None unless `needs_mid`) and of this half's parameters. Empties `internals` as it goes."""
    grad_branch = grad_y if dropout.mlp_residual is None else call.backend.dropout(grad_y, dropout.mlp_residual)
    grad_branch = flat(grad_branch).to(call.dtype)
    stats = internals.pop("stats")
    grad_normed, grads = through_mlp(
        call.backend, call.spec.activation, weights, needs, needs_mid or any(needs["mlp_norm"]), grad_branch, internals, dropout.mlp
    )
    grad_mid, grads["mlp_norm"] = call.through_norm(
        grad_normed, mid, weights.mlp_norm, stats, needs["mlp_norm"], onto=grad_y if needs_mid else None
    )
    return grad_mid, grads


def through_mlp(
    backend: Backend, activation: str, weights: MlpWeights, needs: Mapping[str, Sequence[bool]], needs_rows: bool, grad: Tensor,
    internals: dict[str, Tensor], dropout: Dropout | None,
) -> tuple[Tensor | None, Gradients]:
    """From `grad [N, dim]` of an MLP's output: the gradient of its rows "normed" (None unless `needs_rows`) and those of its projections."""
    grads: Gradients = {}
    grad_gate, grad_up, hidden = backend.activation_backward(
        weights.down.grad_input(grad), internals.pop("gate", None), internals.pop("up"), pointwise(activation), dropout
    )
    grads["down"] = weights.down.grad_tensors(grad, hidden, needs["down"])
    del hidden

    rows = internals.pop("normed")
    grads["up"] = weights.up.grad_tensors(grad_up, rows, needs["up"])
    grad_rows = weights.up.grad_input(grad_up) if needs_rows else None
    del grad_up
    if weights.gate is not None:
        assert grad_gate is not None
        grads["gate"] = weights.gate.grad_tensors(grad_gate, rows, needs["gate"])
        if needs_rows:
            grad_rows = weights.gate.grad_input(grad_gate, into=grad_rows)
    return grad_rows, grads
