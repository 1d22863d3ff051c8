"""Plans: the best of all, and counted as they run."""

import itertools
import random
import time

import pytest
import torch

from ckpt_ext import BlockSpec, Policy, TransformerBlock, checkpoint_sequential
from ckpt_ext.costs import BlockCosts, Cost, block_costs, shared_bytes
from ckpt_ext.memory import LiveStorages, saved_bytes
from ckpt_ext.plan import Point, frontier, least_budget, predict, solve

INPUT, ATTENTION, ALL = Policy("input"), Policy("attention"), Policy("all")
AWAY = Policy("input", offload=True)
FIVE = (INPUT, ATTENTION, ALL, AWAY, Policy("attention", offload=True))


def drawn_block(rng, policies, ties=False):
    """A block of small random figures; seconds are multiples of 1/64, so that sums are exact, and few where there should be ties."""
    size = rng.randint(1, 20)

    def cost(policy):
        saved = rng.randint(0, 8) + (0 if policy.offload else size) + (0 if policy.save == "input" else rng.randint(0, 40))
        seconds = rng.randint(1, 2 if ties else 64) / 64
        return Cost(saved, saved + rng.randint(0, 40), saved + rng.randint(0, 60), seconds)

    forward_seconds = 0.0 if ties else rng.randint(0, 24) / 64
    return BlockCosts(size, rng.randint(0, 15), forward_seconds, {policy: cost(policy) for policy in policies})


def ways(blocks, start=0):
    """All policies and lengths for the blocks from `start` on."""
    if start == len(blocks):
        yield (), ()
        return
    for stop in range(start + 1, len(blocks) + 1):
        heads = []
        for index in range(start, stop):
            lone, first = stop == start + 1, index == start
            heads.append([p for p in blocks[index].options if lone or (p.save == "input" and (first or not p.offload))])
        for policies in itertools.product(*heads):
            for rest, lengths in ways(blocks, stop):
                yield policies + rest, (stop - start, *lengths)


def stepped(blocks, policies, lengths, fixed, head):
    """Peak, seconds and number of segments of a step that is gone through moment by moment."""
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    costs = [block.options[policy] for block, policy in zip(blocks, policies, strict=True)]
    away = {index for index, policy in enumerate(policies) if policy.offload}
    largest = max(block.input for block in blocks)
    kept, peak = {}, 0
    for start, length in zip(starts, lengths, strict=True):
        for index in range(start, start + length):
            waiting = 0 if index in away or not any(other <= index for other in away) else 2 * largest
            peak = max(peak, fixed + sum(kept.values()) + waiting + costs[index].forward)
            kept[index] = costs[index].saved - (blocks[index].input if index > start else 0)
    peak = max(peak, fixed + sum(kept.values()) + (2 * largest if away else 0) + head)
    gradients, taken = 0, False
    for start, length in reversed(list(zip(starts, lengths, strict=True))):
        members = range(start, start + length)
        waiting = largest * (0 if not any(other < start for other in away) else 1 if taken else 2)
        if start in away:
            waiting, taken = largest, True
        there = {}  # what is rebuilt or fetched, by block; the costs of a block have its own
        if length > 1:
            flowing = blocks[members[-1]].input
            for index in members[:-1]:
                beside = sum(kept.values()) - kept[index] + sum(there.values()) + (0 if index in away else waiting)
                peak = max(peak, fixed + beside + costs[index].forward + flowing + gradients)
                if index > start or index in away:
                    there[index] = blocks[index].input
        for index in reversed(members):
            there.pop(index, None)
            beside = sum(kept.values()) - kept[index] + sum(there.values()) + (0 if index in away else waiting)
            peak = max(peak, fixed + beside + costs[index].backward + gradients)
            del kept[index]
            gradients += blocks[index].gradients
    again = sum(blocks[s + i].forward_seconds for s, n in zip(starts, lengths, strict=True) for i in range(n - 1))
    return peak, sum(cost.seconds for cost in costs) + again, sum(length > 1 for length in lengths)


def drawn(seed):
    rng = random.Random(seed)
    policies = [
        FIVE, (INPUT, ALL), (INPUT, AWAY, ALL), (AWAY, ATTENTION), (INPUT, Policy(slices=4)), (ALL, ATTENTION), (AWAY, INPUT),
        (INPUT, Policy(slices=4), AWAY, Policy(slices=4, offload=True)),
    ][seed % 8]  # fmt: skip
    most = {2: 6 if seed % 8 == 4 else 8, 3: 5, 4: 4, 5: 4}[len(policies)]
    blocks = [drawn_block(rng, policies, ties=seed % 3 == 0) for _ in range(1 + seed // 8 % most)]
    return rng, blocks, {"fixed": rng.choice((0, 30)), "head": rng.choice((0, 25, 150))}


@pytest.mark.parametrize("seed", range(64))
def test_no_plan_is_better(seed):
    rng, blocks, around = drawn(seed)
    every = [(*stepped(blocks, *way, **around), way) for way in ways(blocks)]
    for peak, seconds, _, way in rng.sample(every, min(len(every), 200)):
        plan = predict(blocks, *way, **around)
        assert (plan.peak, plan.seconds) == (peak, seconds)
    least = min(peak for peak, *_ in every)
    assert least_budget(blocks, **around) == least
    with pytest.raises(ValueError, match=f"budget must be at least {least} bytes for this chain, got {least - 1}"):
        solve(blocks, least - 1, **around)
    most = max(peak for peak, *_ in every)
    for budget in {least, most, *(rng.randint(least, most) for _ in range(6)), *(rng.choice(every)[0] for _ in range(4))}:
        plan = solve(blocks, budget, **around)
        seconds, peak, segments = min((seconds, peak, segments) for peak, seconds, segments, _ in every if peak <= budget)
        assert (plan.seconds, plan.peak, sum(length > 1 for length in plan.segments)) == (seconds, peak, segments)
        assert stepped(blocks, plan.policies, plan.segments, **around) == (peak, seconds, segments)
    steps = []
    for peak, seconds in sorted((peak, seconds) for peak, seconds, *_ in every):
        if not steps or seconds < steps[-1].seconds:
            steps.append(Point(peak, seconds))
    assert frontier(blocks, **around) == steps


def test_the_drawn_problems_are_no_easy_ones():
    plans = []
    for seed in range(64):
        rng, blocks, around = drawn(seed)
        plans.append(solve(blocks, least_budget(blocks, **around) + rng.randint(0, 60), **around))
    assert sum(max(plan.segments) > 1 for plan in plans) >= 12
    assert sum(any(policy.offload for policy in plan.policies) for plan in plans) >= 8
    assert len({policy for plan in plans for policy in plan.policies}) == 7


def test_of_equal_times_less_peak_then_fewer_segments_wins():
    block = BlockCosts(4, 0, 0.5, {INPUT: Cost(4, 5, 9, 1.0), ALL: Cost(7, 8, 9, 1.0)})
    plan = solve([block] * 3, 1000)
    assert plan.policies == (INPUT,) * 3 and plan.peak == 2 * 4 + 9 and plan.segments == (1, 1, 1)
    free = block._replace(forward_seconds=0.0)
    assert solve([free] * 3, 1000, head=40).segments == (3,)  # of the least kept
    assert solve([free] * 4, 1000).segments in {(3, 1), (2, 1, 1), (1, 2, 1)}  # not (2, 2), which peaks as they do


def test_seconds_that_are_no_binary_fractions():
    rng = random.Random(1)
    blocks = [drawn_block(rng, (INPUT, ALL)) for _ in range(5)]
    blocks = [
        block._replace(forward_seconds=rng.random(), options={p: c._replace(seconds=1e-3 * rng.random()) for p, c in block.options.items()})
        for block in blocks
    ]
    every = [stepped(blocks, *way, 0, 0) for way in ways(blocks)]
    for budget in {peak for peak, *_ in every}:
        assert solve(blocks, budget).seconds == pytest.approx(min(s for peak, s, _ in every if peak <= budget), rel=1e-13)


def layer(rng, spread):
    """A block in the proportions of a Llama's, in units of its input, each figure off by up to `spread`."""

    def off(units):
        return int(units * 2**28 * (1 + spread * rng.random()))

    figures = {
        ALL: (13.7, 16, 18, 3.0), ATTENTION: (2.03, 7, 9, 3.6), INPUT: (1.0, 7, 9, 3.8),
        FIVE[4]: (1.03, 9, 10, 3.7), AWAY: (0.0, 9, 10, 3.9),
    }  # fmt: skip
    options = {
        policy: Cost(2**28 if policy == INPUT else off(saved), off(forward), off(backward), seconds * (1 + spread * rng.random()))
        for policy, (saved, forward, backward, seconds) in figures.items()
    }
    return BlockCosts(2**28, off(3), 1 + spread * rng.random(), options)


@pytest.mark.parametrize(("layers", "spread", "seconds"), [(32, 0.0, 4), (126, 0.0, 20), (32, 0.5, 4)])
def test_long_chains_take_seconds(layers, spread, seconds):
    rng = random.Random(0)
    blocks = [layer(rng, 0.0)] * layers if not spread else [layer(rng, spread) for _ in range(layers)]
    start = time.process_time()
    least = least_budget(blocks, head=2**28)
    plan = solve(blocks, least * 2, head=2**28)
    assert time.process_time() - start < seconds
    assert least < plan.peak <= 2 * least


# --- plans as they run ---

SPECS = [BlockSpec(dim=64, heads=4, kv_heads=2, hidden_dim=hidden, rope_theta=1e4) for hidden in (64, 256, 128, 256, 64)]
BATCH, LENGTH = 8, 128  # so that inputs are large enough to be offloaded


@pytest.fixture(scope="module")
def chain():
    """Blocks, their counted costs, and what is around them."""
    costs = {spec: block_costs(spec, BATCH, LENGTH, dtype=torch.float32, policies=FIVE) for spec in set(SPECS)}
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(TransformerBlock(spec) for spec in SPECS)
    one = BATCH * LENGTH * 64 * 4
    return blocks, [costs[spec] for spec in SPECS], {"fixed": shared_bytes(SPECS, LENGTH), "head": 3 * one}


def run(blocks, segments):
    """Peak of a step, and its gradients."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randn(BATCH, LENGTH, 64, generator=generator) for _ in range(2))
    blocks.zero_grad()
    with LiveStorages([source, target, *blocks.parameters()]) as memory:
        x = source.requires_grad_() * 1
        y = checkpoint_sequential(blocks, x, segments=segments)
        loss = (y * target).sum()
        del x, y
        loss.backward()
    return memory.peak, [source.grad, *(parameter.grad for parameter in blocks.parameters())]


def test_what_runs_is_within_the_budget_and_gives_the_same_bits(chain):
    blocks, costs, around = chain
    predict(costs, [ALL] * 5).apply(blocks)
    _, expected = run(blocks, [1] * 5)
    rng = random.Random(3)
    least, most = least_budget(costs, **around), frontier(costs, **around)[-1].budget
    for budget in [least, *(rng.randint(least, most) for _ in range(3)), most]:
        plan = solve(costs, budget, **around)
        plan.apply(blocks)
        peak, gradients = run(blocks, plan.segments)
        assert peak <= plan.peak <= budget
        assert all(map(torch.equal, gradients, expected))


def test_no_plan_takes_more_than_predicted_and_none_much_less(chain):
    blocks, costs, around = chain
    rng = random.Random(4)
    one = costs[0].input
    for lengths in [[1] * 5] * 4 + [[2, 1, 2], [3, 2], [1, 4], [5], [1, 3, 1], [2, 3]]:
        lone = rng.choice([FIVE, FIVE[3:]])
        policies = []
        for length in lengths:
            policies += [rng.choice(lone if length == 1 else (INPUT, AWAY)), *[INPUT] * (length - 1)]
        plan = predict(costs, policies, lengths, **around)
        plan.apply(blocks)
        peak, _ = run(blocks, plan.segments)
        assert plan.peak - 1.1 * one <= peak <= plan.peak, (policies, lengths)


# --- a chain by lengths ---


def test_lengths_of_segments_in_a_sequence(chain):
    blocks, *_ = chain
    x = torch.randn(1, 8, 64)
    for block, policy in zip(blocks, [ALL, INPUT, INPUT, ATTENTION, ALL], strict=True):
        block.policy = policy
    expected = checkpoint_sequential(blocks, x, segments=(1, 2, 1, 1))
    one_by_one = x
    for block in blocks:
        one_by_one = block(one_by_one)
    assert torch.equal(expected, one_by_one)
    with pytest.raises(ValueError, match=r"blocks\[0\] must keep its input alone in a segment, got save='all'"):
        checkpoint_sequential(blocks, x, segments=(2, 1, 1, 1))
    with pytest.raises(ValueError, match=r"blocks\[0\] must keep its input alone in a segment, got save='all'"):
        checkpoint_sequential(blocks, x, segments=5)
    with pytest.raises(ValueError, match=r"segments must sum to the number of blocks, 5, got \[1, 2\]"):
        checkpoint_sequential(blocks, x, segments=(1, 2))
    with pytest.raises(ValueError, match=r"segments\[1\] must be a positive int, got 0"):
        checkpoint_sequential(blocks, x, segments=[5, 0])
    with pytest.raises(ValueError, match="segments must be a positive int, got 'all'"):
        checkpoint_sequential([], x, segments="all")


def test_segments_of_one_keep_what_their_policies_say(chain):
    blocks, costs, _ = chain
    x = torch.randn(BATCH, LENGTH, 64)
    for block, policy in zip(blocks, [ALL, INPUT, INPUT, ATTENTION, INPUT], strict=True):
        block.policy = policy
    kept = saved_bytes(lambda: checkpoint_sequential(blocks, x, segments=(1, 2, 1, 1)), blocks.parameters())
    plan = predict(costs, [block.policy for block in blocks], (1, 2, 1, 1))
    assert kept == plan.kept + shared_bytes(SPECS, LENGTH)


def test_the_split_adds_up_to_the_peak():
    seen = set()
    for seed in range(64):
        rng, blocks, around = drawn(seed)
        plan = solve(blocks, least_budget(blocks, **around) + rng.randint(0, 60), **around)
        split = plan.split
        assert sum(split) == plan.peak and min(split) >= 0 and split.fixed == around["fixed"]
        seen.add(plan.peak == plan.head_peak)
    assert seen == {True, False}
    block = BlockCosts(4, 3, 1.0, {INPUT: Cost(5, 6, 20, 1.0), ALL: Cost(7, 40, 30, 1.0)})
    assert predict([block] * 3, [ALL, INPUT, INPUT], fixed=100).split == (100, 0, 0, 40)  # the forward pass of block 0
    assert predict([block] * 3, [INPUT] * 3, fixed=100).split == (100, 10, 0, 20)
    assert predict([block] * 3, [INPUT, ALL, INPUT], fixed=100, head=1).split == (100, 5, 0, 40)
    flat = block._replace(gradients=9)
    assert predict([flat] * 3, [INPUT] * 3, fixed=100).split == (100, 0, 18, 20)  # the backward pass of block 0


def test_a_plan_is_for_as_many_blocks_as_it_has(chain):
    blocks, costs, _ = chain
    plan = predict(costs, [ATTENTION] * 5)
    plan.apply(blocks)
    assert all(block.policy == ATTENTION for block in blocks)
    with pytest.raises(ValueError, match="blocks must be the plan's 5, got 4"):
        predict(costs, [ALL] * 5).apply(blocks[:4])
    with pytest.raises(ValueError, match=r"blocks\[4\] must be a TransformerBlock"):
        predict(costs, [ALL] * 5).apply([*blocks[:4], torch.nn.Linear(1, 1)])
    assert all(block.policy == ATTENTION for block in blocks)


def test_bad_arguments():
    rng = random.Random(0)
    block = drawn_block(rng, (INPUT, ALL))
    with pytest.raises(ValueError, match="blocks must not be empty"):
        solve([], 10)
    with pytest.raises(ValueError, match="budget must be an int, got 1.5"):
        solve([block], 1.5)
    with pytest.raises(ValueError, match="head must be a number of bytes"):
        solve([block], 10, head=-1)
    with pytest.raises(ValueError, match=r"blocks\[1\].gradients must be an int, got 1.0"):
        least_budget([block, block._replace(gradients=1.0)])
    with pytest.raises(ValueError, match="points must be a positive int, got 0"):
        frontier([block], points=0)
    with pytest.raises(ValueError, match="policies must be one for each of the 1 blocks, got 2"):
        predict([block], [ALL] * 2)
    with pytest.raises(ValueError, match=r"policies\[0\] must be among the block's options"):
        predict([block], [ATTENTION])


def test_a_frontier_of_few_points_is_part_of_the_whole():
    rng = random.Random(6)
    blocks, around = [drawn_block(rng, FIVE) for _ in range(6)], {"fixed": 3, "head": 2}
    whole = frontier(blocks, **around)
    few = frontier(blocks, points=4, **around)
    assert len(whole) > 4 >= len(few) and set(few) <= set(whole) and (few[0], few[-1]) == (whole[0], whole[-1])
    assert frontier(blocks, points=1, **around) == [whole[-1]]
