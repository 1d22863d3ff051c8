"""Plans and costs as files: what is written comes back, and anything else is refused by name."""

import dataclasses
import json

import pytest

from ckpt_ext import Policy
from ckpt_ext.cost_chain import CostChain, Mark
from ckpt_ext.costs import BlockCosts, Cost
from ckpt_ext.plan import Plan, predict

INPUT, ATTENTION, ALL = Policy("input"), Policy("attention"), Policy("all")
AWAY = Policy("input", offload=True)
FIVE = (INPUT, ATTENTION, ALL, AWAY, Policy("attention", offload=True))


def block(place):
    """A block of small figures, unlike those at other places."""
    options = {policy: Cost(10 + place + more, 20 + more, 30 + more, 0.25 * (9 - more)) for more, policy in enumerate(FIVE)}
    return BlockCosts(10 + place, 3, 0.5, options)


@pytest.fixture
def plan():
    return predict([block(place) for place in range(4)], [AWAY, INPUT, ALL, ATTENTION], [2, 1, 1], fixed=7, head=9, budget=300)


def test_a_plan_comes_back_from_its_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    entries = json.loads((tmp_path / "plan.json").read_text())
    assert entries["version"] == 1 and entries["peak"] == plan.peak
    assert entries["blocks"][0]["policy"] == dataclasses.asdict(plan.policies[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("budget"), "plan must have budget"),
        (lambda e: e.update(more=1), "plan must have no other fields .* got more"),
        (lambda e: e.update(version=2), "version must be 1, got 2"),
        (lambda e: e.update(budget="24GB"), "budget must be an int, got '24GB'"),
        (lambda e: e.update(fixed=-1), "fixed must be a number of bytes"),
        (lambda e: e.update(peak=3), "peak must be .*, as the blocks have it, got 3"),
        (lambda e: e.update(seconds=-1.0), "seconds must be .*, as the blocks have it, got -1.0"),
        (lambda e: e.update(blocks={}), "blocks must be a list"),
        (lambda e: e.update(blocks=[], segments=[]), "blocks must not be empty"),
        (lambda e: e["segments"].append(1), "segments must sum to the number of blocks"),
        (lambda e: e["segments"].append(0), r"segments\[\d\] must be a positive int, got 0"),
        (lambda e: e["blocks"][1].pop("kept"), r"blocks\[1\] must have kept"),
        (lambda e: e["blocks"].__setitem__(1, 3), r"blocks\[1\] must be an object"),
        (lambda e: e["blocks"][1].update(backward_peak=1.5), r"blocks\[1\].backward_peak must be an int, got 1.5"),
        (lambda e: e["blocks"][1].update(seconds=-1), r"blocks\[1\].seconds must be non-negative, got -1"),
        (lambda e: e["blocks"][1].update(seconds=float("nan")), r"blocks\[1\].seconds must be a finite number, got nan"),
        (lambda e: e["blocks"][1]["policy"].update(save="most"), r"blocks\[1\].policy.save must be one of"),
        (lambda e: e["blocks"][1]["policy"].pop("slices"), r"blocks\[1\].policy must have slices"),
        (lambda e: e["blocks"][1]["policy"].update(save="all"), r'blocks\[1\].policy.save must be "input" in a segment, got \'all\''),
        (lambda e: e["blocks"][1]["policy"].update(offload=True), r"blocks\[1\].policy.offload must be False behind the first"),
    ],
)
def test_files_that_are_no_plans_are_refused(plan, change, message):
    plan = dataclasses.replace(plan, segments=(len(plan.blocks),), blocks=tuple(b._replace(policy=INPUT) for b in plan.blocks))
    entries = json.loads(plan.to_json())
    change(entries)
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(entries))


def test_text_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="plan must be JSON"):
        Plan.from_json("{")


def test_a_chain_of_costs_comes_back_from_its_file(tmp_path):
    first, second = block(0), block(1)
    costs = CostChain((first, first, second, first), fixed=3, head=4, floor=5, marks={"torch checkpoint": Mark(99, 1.5)})
    costs.save(tmp_path / "costs.json")
    assert CostChain.load(tmp_path / "costs.json") == costs
    assert [block["count"] for block in json.loads(costs.to_json())["blocks"]] == [2, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("head"), "costs must have head"),
        (lambda e: e.update(version=0), "version must be 1, got 0"),
        (lambda e: e.update(floor=-1), "floor must be a number of bytes"),
        (lambda e: e.update(blocks=[]), "blocks must not be empty"),
        (lambda e: e.update(marks={"other": {"peak": 1, "seconds": -1}}), "marks.other.seconds must be non-negative, got -1"),
        (lambda e: e["blocks"][0].update(count=0), r"blocks\[0\].count must be a positive int, got 0"),
        (lambda e: e["blocks"][0].update(input=2.5), r"blocks\[0\].input must be an int, got 2.5"),
        (lambda e: e["blocks"][0].update(forward_seconds=-0.5), r"blocks\[0\].forward_seconds must be non-negative, got -0.5"),
        (lambda e: e["blocks"][0].update(options=[]), r"blocks\[0\].options must not be empty"),
        (lambda e: e["blocks"][0]["options"][0].update(saved=0), r"blocks\[0\].options\[.*\].saved must be at least the input's"),
        (lambda e: e["blocks"][0]["options"][0].update(forward=None), r"blocks\[0\].options\[.*\].forward must be an int, got None"),
        (lambda e: e["blocks"][0]["options"].append(e["blocks"][0]["options"][0]), r"options\[5\].policy must be given once"),
    ],
)
def test_files_that_are_no_costs_are_refused(change, message):
    entries = json.loads(CostChain((block(0),)).to_json())
    change(entries)
    with pytest.raises(ValueError, match=message):
        CostChain.from_json(json.dumps(entries))
