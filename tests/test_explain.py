"""Where the memory goes and what helps: the advice follows from estimates."""

import json

import pytest

from ckpt_ext import BlockSpec, cli
from ckpt_ext.budget import Training
from ckpt_ext.explain import RECOMPUTE, as_markdown, explain, parts
from ckpt_ext.fit import METHODS, Method, estimate
from ckpt_ext.shapes import ModelShape

LAYERS = (BlockSpec(dim=64, heads=4, kv_heads=2, hidden_dim=160, rope_theta=1e4),) * 6
SHAPE = ModelShape("small", LAYERS, 100, False)
WORDY = ModelShape("wordy", LAYERS, 50_000, True)
TORCH, OURS = METHODS[1], METHODS[2]


def test_the_parts_are_the_whole():
    found = explain(SHAPE, TORCH, Training(), 1, 2048)
    assert found.now.peak == estimate(SHAPE, TORCH, Training(), 1, 2048).peak == sum(size for _, size, _, _ in parts(found))
    assert sum(share for _, _, share, _ in parts(found)) == pytest.approx(1)


def test_every_piece_of_advice_is_an_estimate():
    found = explain(SHAPE, TORCH, Training(), 1, 2048)
    for change in found.alternatives:
        assert change.saved == found.now.peak - change.estimate.peak
    assert [change.saved for change in found.alternatives] == sorted((change.saved for change in found.alternatives), reverse=True)
    by_name = {change.name: change for change in found.alternatives}
    tiled = Method("x", "torch checkpoint", loss="tiled")
    assert by_name["linear_cross_entropy, whose logits are never whole"].estimate == estimate(SHAPE, tiled, Training(), 1, 2048)
    assert by_name["8-bit optimizer state"].estimate == estimate(SHAPE, TORCH, Training("adamw-8bit"), 1, 2048)
    assert by_name["adapters of rank 16"].estimate == estimate(SHAPE, TORCH, Training(rank=16), 1, 2048)


@pytest.mark.parametrize("shape, method, training, length, part, helps", [
    (SHAPE, OURS, Training("adamw-fp32"), 16, "optimizer state", ("8-bit", "sharded", "adapters", "host's memory")),
    (WORDY, TORCH, Training(), 4096, "logits and loss", ("linear_cross_entropy",)),
    (ModelShape("deep", LAYERS * 8, 100, False), OURS, Training("none"), 8192, "saved between forward", ("segments", "offload")),
    (SHAPE, METHODS[0], Training("none"), 8192, "saved between forward", ("ours", "checkpoint")),
], ids=["state", "logits", "inputs", "plain"])  # fmt: skip
def test_what_dominates_is_named_and_so_is_what_helps(shape, method, training, length, part, helps):
    found = explain(shape, method, training, 1, length)
    assert part in found.verdict.split(".")[0]
    assert any(word in found.helpful[0].name for word in helps), found.helpful[0].name
    assert f"{found.helpful[0].name}" in found.verdict


def test_recompute_that_does_not_help_is_called_so():
    found = explain(SHAPE, OURS, Training("adamw-fp32"), 1, 16)
    assert "Recompute does not help" in found.verdict
    recompute = [change for change in found.alternatives if change.name in RECOMPUTE]
    assert recompute and all(change.saved < found.now.peak / 100 for change in recompute)
    assert "Recompute helps" in explain(SHAPE, METHODS[0], Training("none"), 1, 8192).verdict


def test_slices_help_where_a_block_at_work_dominates():
    found = explain(ModelShape("wide", (BlockSpec(dim=64, heads=4, hidden_dim=4096),), 10, False), OURS, Training(rank=1), 1, 3000)
    assert "block at work" in found.verdict and any("slices" in change.name for change in found.helpful)


def test_whether_a_memory_is_enough():
    need = estimate(SHAPE, TORCH, Training(), 1, 2048).peak
    assert "is enough" in explain(SHAPE, TORCH, Training(), 1, 2048, need).verdict
    short = explain(SHAPE, TORCH, Training(), 1, 2048, need - 1)
    assert "is not enough. Any of these changes makes it so: " in short.verdict
    assert "No change alone makes it so" in explain(SHAPE, TORCH, Training(), 1, 2048, 1000).verdict


def test_markdown_has_a_row_for_each_part_and_change():
    found = explain(SHAPE, TORCH, Training(), 1, 2048)
    text = as_markdown(found, "ckpt-ext explain x")
    assert found.verdict in text and text.count("\n| ") == 3 + len(list(parts(found))) + len(found.alternatives)


def test_the_command(tmp_path, capsys):
    arguments = ["explain", "smollm2-135m", "--length", "512", "--policy", "input"]
    assert cli.main([*arguments, "--memory", "80GB", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "optimizer state" in printed and "#" in printed and "Most of it" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["peak"] == sum(report["parts"].values()) and report["alternatives"]
    assert cli.main([*arguments, "--memory", "10MB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["memory"] == 10_000_000
    assert cli.main([*arguments, "--offload", "--segments", "--train", "adapters"]) == 0


@pytest.mark.parametrize("arguments, message", [
    (["no-such", "--length", "8"], "model must be a directory"), (["smollm2-135m", "--length", "0"], "length must be a positive int"),
    (["smollm2-135m", "--length", "8", "--policy", "all", "--offload"], "offload must be False"),
])  # fmt: skip
def test_the_command_refuses(capsys, arguments, message):
    assert cli.main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err
