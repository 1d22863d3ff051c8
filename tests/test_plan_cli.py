"""`ckpt-ext plan` as one types it."""

import json

import pytest

from ckpt_ext import Policy, cli
from ckpt_ext.budget import Training
from ckpt_ext.cost_chain import CostChain
from ckpt_ext.costs import BlockCosts, Cost
from ckpt_ext.model_costs import model_costs
from ckpt_ext.plan import Plan, predict
from ckpt_ext.shapes import load

BLOCK = BlockCosts(
    10, 5, 1.0, {Policy("input"): Cost(10, 30, 40, 4.0), Policy("attention"): Cost(20, 30, 40, 3.5), Policy("all"): Cost(60, 65, 70, 3.0)}
)


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    CostChain((BLOCK,) * 6, fixed=100, head=20, floor=120).save(path)
    return path


def test_a_plan_and_its_reports(costs, tmp_path, capsys):
    assert cli.main(["plan", "--costs", str(costs), "--budget", "300", "--reserve", "0", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert plan.peak <= 300 and plan.budget == 300
    assert "attention" in printed and f"peak {plan.peak} B of 300 B" in printed
    assert CostChain.load(tmp_path / "out" / "costs.json") == CostChain.load(costs)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "ckpt-ext plan" in report and "none was measured" in report
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 10_000


def test_equal_blocks_are_one_row_and_segments_keep_their_length(costs, tmp_path, capsys):
    assert cli.main(["plan", "--costs", str(costs), "--budget", "183", "--reserve", "0", "--out", str(tmp_path)]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert max(plan.segments) > 1
    assert any(f" {length} " in capsys.readouterr().out for length in plan.segments if length > 1)


def test_what_does_not_fit_is_told(costs, capsys):
    assert cli.main(["plan", "--costs", str(costs), "--budget", "110", "--reserve", "0"]) == 1
    assert "nothing fits in 110 B: the leanest plan takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--budget", "1GB"], "either a model or --costs must be given"),
        (["smollm2-135m", "--budget", "1GB"], "--length must be given"),
        (["smollm2-135m", "--budget", "many", "--length", "64"], "a size must be a positive number"),
        (["no-such-model", "--budget", "1GB", "--length", "64"], "smollm2-135m"),
        (["smollm2-135m", "--budget", "1GB", "--length", "0"], "length must be a positive int"),
        (["smollm2-135m", "--budget", "1GB", "--length", "64", "--flops", "0"], "flops must be positive"),
    ],
)
def test_bad_arguments_are_told_in_a_line(arguments, message, capsys):
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_model_by_its_name(tmp_path, capsys):
    command = ["plan", "smollm2-135m", "--length", "4096", "--budget", "4GB", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert len(plan.blocks) == 30 and plan.peak <= 0.95 * 4e9
    assert json.loads((tmp_path / "costs.json").read_text())["marks"].keys() == {"all", "input", "torch checkpoint"}


def test_torchs_checkpoint_is_marked_where_it_is():
    shape = load("smollm2-135m")
    chain = model_costs(shape, Training(), 1, 32768)
    block, spec = chain.blocks[0], shape.layers[0]
    again = chain.marks["torch checkpoint"].seconds - chain.marks["all"].seconds
    last = 2 * 32768 * spec.dim * spec.hidden_dim / 4e14
    assert again == pytest.approx(30 * (block.forward_seconds - last), rel=1e-9)
    assert chain.marks["input"].peak < chain.marks["torch checkpoint"].peak < chain.marks["all"].peak
    assert chain.marks["torch checkpoint"].peak - chain.fixed > 30 * block.input


def test_more_of_anything_takes_more():
    shape = load("smollm2-135m")

    def peak(training, length=1024):
        chain = model_costs(shape, training, 1, length)
        plan = predict(chain.blocks, [Policy("input")] * 30, fixed=chain.fixed, head=chain.head)
        return max(plan.peak, chain.floor)

    assert peak(Training(), 4096) > peak(Training(), 1024) > peak(Training("none"), 1024)
    assert peak(Training(rank=8)) < peak(Training())
    assert peak(Training(accumulate=True)) > peak(Training())
