"""The costs of a model's chain of blocks and of what surrounds it, counted without data: what `ckpt-ext plan` solves."""

from __future__ import annotations

from dataclasses import replace

from .budget import Training, adapter_parameters, head_bytes, holdings
from .cost_chain import CostChain, Mark
from .costs import BlockCosts, Rates, block_costs, shared_bytes
from .plan import predict
from .shapes import ModelShape, linear_shapes
from .spec import BlockSpec, Policy


def model_costs(shape: ModelShape, training: Training, batch: int, length: int, rates: Rates | None = None) -> CostChain:
    """The costs on a GPU of a step with `functional.linear_cross_entropy`, with the chain under one policy throughout as marks.

    Seconds follow from floating-point operations and bytes at `rates`; nothing is timed.
    """
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
    return replace(chain, marks={name: _mark(chain, policy) for name, policy in (("all", Policy("all")), ("input", Policy("input")))})


def _block(spec: BlockSpec, training: Training, batch: int, length: int, rates: Rates | None) -> BlockCosts:
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
