"""The matrix products of an MLP's backward, in whichever way it is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from .gradients import Products
from .projections import Projection, stretches


class MlpWeights(Protocol):
    """The projections of an MLP; `gate` is None in a plain one."""

    @property
    def gate(self) -> Projection | None: ...
    @property
    def up(self) -> Projection: ...
    @property
    def down(self) -> Projection: ...


def through_mlp(
    weights: MlpWeights, needs: Mapping[str, Sequence[bool]], needs_rows: bool, grad: Tensor, products: Products, *,
    differentiate: Callable[[Tensor], tuple[Tensor | None, Tensor, Tensor]], rows: Callable[[], Tensor], onto: Tensor | None = None,
    of_down: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """From `grad [N, dim]` of an MLP's output: the gradient of its rows (None unless `needs_rows`); its projections' go to `products`.

    `differentiate` takes the gradient of the hidden layer to `(grad_gate, grad_up, hidden)`; `rows` gives what gate and up are taken of,
    and is not called where no weight of theirs needs a gradient and neither reads rows. The gradient of the rows is added to `onto` where
    that is given. `of_down`, the hidden layer, must be given where the down projection reads rows.
    """
    grad_gate, grad_up, hidden = differentiate(weights.down.grad_input(grad, x=of_down))
    products.add_product("down", weights.down, grad, hidden, needs["down"])
    del hidden
    of = None
    reads_rows = weights.up.kind.reads_rows or (weights.gate is not None and weights.gate.kind.reads_rows)
    if any(needs["up"]) or any(needs.get("gate", ())) or (needs_rows and reads_rows):
        of = rows()
        products.add_product("up", weights.up, grad_up, of, needs["up"])
        if weights.gate is not None and grad_gate is not None:
            products.add_product("gate", weights.gate, grad_gate, of, needs["gate"])
    if not reads_rows:
        of = None
    return _grad_rows(weights, grad_gate, grad_up, onto, of) if needs_rows else None


def _grad_rows(
    weights: MlpWeights, grad_gate: Tensor | None, grad_up: Tensor, onto: Tensor | None, rows: Tensor | None
) -> Tensor:
    """Gradient of what gate and up are taken of, added to `onto`: gate's and up's together first, for `onto` is read and written once."""
    if onto is not None and onto.dtype != grad_up.dtype:
        for span in stretches(*onto.shape):
            onto[span].add_(_grad_rows(weights, None if grad_gate is None else grad_gate[span], grad_up[span], None, None))
        return onto
    grad_rows = weights.up.grad_input(grad_up, into=onto, x=rows)
    if weights.gate is not None and grad_gate is not None:
        grad_rows = weights.gate.grad_input(grad_gate, into=grad_rows, x=rows)
    return grad_rows


def place_of(branch: Tensor, rows: Tensor) -> Tensor | None:
    """Where rows of the stream may lie instead of `branch`, which autocast may have made of another dtype."""
    return branch if branch.dtype == rows.dtype and branch.is_contiguous() else None
