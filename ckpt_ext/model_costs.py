"""The costs of a model's chain of blocks and of what surrounds it, counted without data: what `ckpt-ext plan` solves."""

from __future__ import annotations

from dataclasses import replace

from .budget import Training, adapter_parameters, head_bytes, holdings
from .cost_chain import CostChain, Mark
from .costs import BlockCosts, Cost, Rates, block_costs, shared_bytes
from .plan import predict
from .shapes import ModelShape, linear_shapes
from .spec import BlockSpec, Policy
from .stock import stock_bytes


def model_costs(shape: ModelShape, training: Training, batch: int, length: int, rates: Rates | None = None) -> CostChain:
    """The costs on a GPU of a step with `functional.linear_cross_entropy`; marks: one policy throughout, and torch's checkpoint.

    Seconds follow from floating-point operations and bytes at `rates`; nothing is timed.
    """
    rates = rates or Rates()
    held = holdings(shape, training)
    costs = {spec: _block(spec, training, batch, length, rates) for spec in set(shape.layers)}
    blocks = [costs[spec]._replace(gradients=left) for spec, left in zip(shape.layers, held.block_gradients, strict=True)]
    after = held.head_gradients + sum(held.block_gradients)
    all_gradients = after + held.embedding_rest
    early = held.head_gradients
    if training.accumulate:
        # The old gradients are there all the time.
        blocks, early, after = [block._replace(gradients=0) for block in blocks], all_gradients, all_gradients
    base = held.parameters + held.states + shared_bytes(shape.layers, length) + 16 * batch * length  # with symbols and targets
    found = head_bytes(shape.layers[-1], shape.vocab, shape.softcap, batch, length, "tiled", training.dtype, not training.rank)
    head = max(found.forward, found.backward) - (0 if training.accumulate else early)
    embedding = 0 if training.rank else after + blocks[0].input + held.embedding_gradients
    chain = CostChain(tuple(blocks), base + early, max(head, 0), base + max(all_gradients, embedding))
    stock = {spec: _stock(spec, costs[spec], training, batch, length, rates) for spec in costs}
    checkpointed = replace(chain, blocks=tuple(
        block._replace(options={Policy("input"): stock[spec]}) for block, spec in zip(blocks, shape.layers, strict=True)
    ))  # fmt: skip
    marks = {save: _mark(chain, Policy(save)) for save in ("all", "input")}
    return replace(chain, marks={**marks, "torch checkpoint": _mark(checkpointed, Policy("input"))})


def _stock(spec: BlockSpec, costs: BlockCosts, training: Training, batch: int, length: int, rates: Rates) -> Cost:
    """A block under `torch.utils.checkpoint`: forward is run again up to its last projection, as if with the kernels of ours."""
    found = stock_bytes(spec, batch, length, "torch checkpoint", training.dtype, trained=not training.rank, rank=training.rank)
    last = 2 * batch * length * spec.hidden_dim * spec.dim / rates.flops
    return Cost(*found, costs.options[Policy("all")].seconds + costs.forward_seconds - last)


def _block(spec: BlockSpec, training: Training, batch: int, length: int, rates: Rates) -> BlockCosts:
    found = block_costs(spec, batch, length, dtype=training.dtype, trained=not training.rank, device="cuda", rates=rates)
    if not training.rank:
        return found
    # What lies between an adapter's two matrices, and its gradients, of all layers at once, which is more than there ever are.
    extra = 2 * training.rank * len(linear_shapes(spec)) * batch * length * training.dtype.itemsize
    whole = adapter_parameters(spec, training.rank) * training.dtype.itemsize
    options = {
        policy: cost._replace(forward=cost.forward + extra, backward=cost.backward + extra + whole)
        for policy, cost in found.options.items()
    }
    return found._replace(options=options)


def _mark(chain: CostChain, policy: Policy) -> Mark:
    plan = predict(chain.blocks, [policy] * len(chain.blocks), fixed=chain.fixed, head=chain.head)
    return Mark(max(plan.peak, chain.floor), plan.seconds)
