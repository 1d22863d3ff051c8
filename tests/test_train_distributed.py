"""`bench.train_distributed` at its smallest, on two processes: what it writes, and that it fails where it must."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_ext.memory import LiveStorages
from ckpt_ext.ranks import run_on_ranks

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # `bench` is no part of the installed package

from bench import collectives, sharding, train_distributed  # noqa: E402
from bench.train_distributed import Row, judge  # noqa: E402

LAYOUTS = ("DDP", "FSDP2 per block", "TP")
TINY = "--layers 1 --dim 16 --heads 2 --kv-heads 2 --hidden-dim 32 --length 8 --batch 1 --steps 1 --ranks 2 --device cpu".split()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One run of the command, and the folder it has written."""
    folder = tmp_path_factory.mktemp("report")
    command = [sys.executable, "-m", "bench.train_distributed", *TINY, "--out", str(folder), "--layouts", *LAYOUTS, "HSDP per block"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300), folder


def test_the_command_succeeds_and_writes_what_it_found(written):
    done, folder = written
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "report.json").read_text())
    assert found["ranks"] == 2 and found["wrong"] == [] and found["settings"]["model"] == "native"
    rows = {(row["layout"], row["way"]): row for row in found["rows"]}
    assert set(rows) == {(layout, way) for layout in (*LAYOUTS, "HSDP per block") for way in sharding.WAYS}
    for layout in LAYOUTS:
        nothing, torchs, ours = (rows[layout, way] for way in sharding.WAYS)
        for row in (nothing, torchs, ours):
            assert row["reason"] == "" and row["tokens_per_s"] > 0
            assert len(row["peak_mib"]) == 2 and min(row["peak_mib"]) > 0
            assert len(row["losses"]) == train_distributed.WARM_UP + 2 and all(3 < loss < 8 for loss in row["losses"])
        assert torchs["losses"] == nothing["losses"] and ours["losses"] == pytest.approx(nothing["losses"], abs=1e-4)
        assert ours["collectives"] == nothing["collectives"]
        if layout == "TP":  # elsewhere the logits are all there is to so small a step
            assert max(ours["peak_mib"]) < max(nothing["peak_mib"])
    assert rows["DDP", "ours"]["collectives"] == {"all-reduce": 1}
    assert rows["FSDP2 per block", "ours"]["collectives"] == {"all-gather": 4, "reduce-scatter": 2}
    assert rows["TP", "ours"]["collectives"] == {"all-reduce": 4}
    assert rows["TP", "torch checkpoint"]["collectives"] == {"all-reduce": 5}
    for way in sharding.WAYS:
        assert "must have an even number of ranks, 4 or more, got 2" in rows["HSDP per block", way]["reason"]


def test_the_report_says_what_the_figures_are_not(written):
    done, folder = written
    page = (folder / "report.md").read_text()
    assert train_distributed.CPU_NOTE in page and train_distributed.CPU_NOTE in done.stdout
    assert "| TP | 4 all-reduce | 5 all-reduce | 4 all-reduce |" in page
    assert "counted in a communication hook" in page and "transformers' Llama" in page


def rows(**changes):
    """Figures of one layout in which nothing is wrong, but for `changes` of ours."""
    counts, losses = {"all-gather": 4, "reduce-scatter": 2}, [5.5, 5.25]
    ours = {"collectives": counts, "losses": losses} | changes
    theirs = [Row("FSDP2", way, collectives=counts, losses=losses) for way in ("nothing", "torch checkpoint")]
    return [*theirs, Row("FSDP2", "ours", **ours)]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, []),
        ({"losses": [5.5, 5.25001]}, []),
        ({"collectives": {"all-gather": 6, "reduce-scatter": 2}},
         ["FSDP2: ours has 6 all-gather, 2 reduce-scatter a step, nothing checkpointed 4 all-gather, 2 reduce-scatter"]),
        ({"losses": [5.5, 5.26]}, ["FSDP2: losses of ours are 1.0e-02 away from those of nothing checkpointed"]),
        ({"losses": [5.5, float("nan")]}, ["FSDP2: losses of ours are nan away from those of nothing checkpointed"]),
        ({"losses": [], "reason": "no"}, ["FSDP2: ours did not run as it must: no"]),
        ({"reason": "ranks differ"}, ["FSDP2: ours did not run as it must: ranks differ"]),
    ],
)  # fmt: skip
def test_what_is_judged_wrong(changes, expected):
    assert judge(rows(**changes), 1e-4) == expected


def test_operators_of_one_kind_count_alike():
    kinds = {
        "allreduce_": "all-reduce", "all_reduce": "all-reduce", "_allgather_base_": "all-gather", "barrier": "barrier",
        "all_gather_into_tensor": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
    }  # fmt: skip
    assert {name: collectives.kind_of(name) for name in kinds} == kinds


class TalksAgain(torch.autograd.Function):
    """A planted fault: one more all-reduce in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad.clone())
        return grad


def extra_collectives_are_found(rank):
    options = train_distributed.parsed(TINY)
    layouts = {layout.name: layout for layout in sharding.LAYOUTS}
    made = sharding.made

    def made_worse(way, *arguments):
        subject = made(way, *arguments)
        if way == sharding.OURS:
            for name in subject.layers:
                subject.model.get_submodule(name).register_forward_hook(lambda layer, inputs, output: TalksAgain.apply(output))
        return subject

    try:
        sharding.made = made_worse
        (wrong,) = judge(train_distributed.measure(layouts["DDP"], options), 1e-4)
        assert wrong == "DDP: ours has 2 all-reduce a step, nothing checkpointed 1 all-reduce"
        options.out, options.layouts = None, ["FSDP2 per block"]
        assert train_distributed.on_rank(options) == 1
    finally:
        sharding.made = made


def memory_of_distributed_tensors(rank):
    """A DTensor is as large as this rank's share of it and dies with it; what its operators make within counts, too."""
    whole = torch.randn(64, 32)
    with LiveStorages([whole]) as memory:
        shared = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        before = memory.live
        memory.ignore(shared)
        assert memory.live == before - 32 * 32 * 4
        before = memory.live
        doubled = shared * 2
        assert memory.live == before + 32 * 32 * 4
        del doubled
        assert memory.live == before
    part = shared.sum(0)  # not added up over the ranks yet, which `relu` does within itself
    with LiveStorages([part]) as memory:
        result = part.relu()
        assert memory.live == 32 * 4 == result.to_local().nbytes
    assert memory.peak == 2 * 32 * 4


CASES = [extra_collectives_are_found, memory_of_distributed_tensors]


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_on_ranks(case, failures):
    assert not failures[case], failures[case]
