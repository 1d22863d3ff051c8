"""The benchmarks: what the harness measures, refuses and writes, and that each of them runs, tiny, on a CPU."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # `bench` is no part of the installed package

from bench import block, clock, harness, kernels, peers, plot, training  # noqa: E402
from bench.clock import Work  # noqa: E402
from bench.harness import Budget, Case, Provider  # noqa: E402

CPU = torch.device("cpu")
ARGUMENTS = Namespace(device=CPU, dtype=torch.float32, small=True, lengths=[1], layers=1)


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    monkeypatch.setattr(harness, "ceilings", lambda device: {"gb_per_s": 10.0, "tflops": 0.5})


def doubling(prepare=None, **figures) -> Case:
    """A case that wants `2 * x`, whose shape is a length, with one right provider of ours and one more."""

    def x(length: int) -> torch.Tensor:
        return torch.linspace(1, 2, length)

    def right(length: int) -> Work:
        values = x(length)
        return Work(lambda _: {"y": values * 2})

    return Case(
        figures.pop("name", "doubling"), 64, 16,
        truth=lambda length: {"y": x(length).double() * 2}, eager=lambda length: {"y": x(length) * 2},
        providers={"ours": Provider(right, ours=True), "other": Provider(prepare or right)}, tolerance=1e-3, **figures,
    )  # fmt: skip


def rows(case: Case, seconds: float = 60) -> dict[str, dict]:
    return {row["provider"]: row for row in harness.measure(case, CPU, Budget(seconds))}


class TestHarness:
    def test_right_providers_are_timed(self):
        found = rows(doubling(bytes=1e6, tokens=64))
        for row in found.values():
            assert row["status"] == "ok" and row["error"] < 1e-6 and row["runs"] >= 2
            assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"]
            assert row["gb_per_s"] == pytest.approx(1e6 / row["ms"] / 1e6) and row["tokens_per_s"] > 0
            assert row["peak_bytes"] == 64 * 4
        ceiling = {"gb_per_s": 2 * found["ours"]["gb_per_s"]}
        assert harness.with_fractions([found["ours"]], ceiling)[0]["fraction"] == pytest.approx(0.5)

    @pytest.mark.parametrize(
        "wrong, reason",
        [
            (lambda length: torch.linspace(1, 2, length) * 2.01, "relative error 0.005 > 0.001"),
            (lambda length: torch.full((length,), torch.nan), "relative error nan > 0.001"),
            (lambda length: torch.ones(length + 1), "expected (16,)"),
            (lambda length: torch.linspace(1, 2, length) * (2 if length == 16 else 3), "at the full shape 0.5 away"),
        ],
        ids=["error", "nan", "shape", "only at the full shape"],
    )
    def test_a_wrong_provider_is_refused_and_not_timed(self, wrong, reason):
        timed = []

        def prepare(length: int) -> Work:
            return Work(lambda _: {"y": wrong(length)}, before=lambda: timed.append(length))

        row = rows(doubling(prepare))["other"]
        assert row["status"] == "wrong" and reason in row["detail"] and "ms" not in row
        assert len(timed) <= 2

    def test_ours_are_held_to_twice_eagers_error(self):
        """An error that another provider may have."""
        case = doubling()
        case.providers["ours"] = Provider(lambda length: Work(lambda _: {"y": torch.linspace(1, 2, length) * 2.0001}), ours=True)
        row = rows(case)["ours"]
        assert row["status"] == "wrong" and "* 0 (eager)" in row["detail"]

    def test_missing_results_failures_and_absence_are_told(self):
        assert "results must be y, got" in rows(doubling(lambda length: Work(lambda _: {})))["other"]["detail"]

        def fail(length: int) -> Work:
            raise KeyError("nothing there")

        assert rows(doubling(fail))["other"]["detail"] == "KeyError: 'nothing there'"
        case = doubling()
        case.providers["other"] = Provider(None, "not installed")
        assert rows(case)["other"] | {"status": "absent", "detail": "not installed"} == rows(case)["other"]

    def test_a_provider_that_fails_late_is_dropped_alone(self):
        calls = []

        def run(_: None) -> dict[str, torch.Tensor]:
            calls.append(0)
            if len(calls) > 3:
                raise torch.OutOfMemoryError("no more")
            return {"y": torch.linspace(1, 2, 16 if len(calls) == 1 else 64) * 2}

        found = rows(doubling(lambda length: Work(run)))
        assert found["other"]["status"] == "out of memory" and "ms" not in found["other"]
        assert found["ours"]["status"] == "ok"

    def test_each_run_is_prepared_outside_of_the_clock(self):
        def before() -> None:
            time.sleep(0.05)

        assert clock.clock_for(CPU)(Work(lambda _: {}, before=before)) < 0.04

    def test_a_gpu_is_timed_from_a_cold_cache_with_the_host_ahead(self, monkeypatch):
        """By events right around the run, as far as that can be seen without a GPU."""
        order = []

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                order.append("event")

            def synchronize(self) -> None:
                order.append("wait")

            def elapsed_time(self, end: "Event") -> float:
                return 1500.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(L2_cache_size=64))
        work = Work(lambda state: order.append(state), before=lambda: order.append("before") or "run")
        assert clock._GpuClock(CPU)(work) == 1.5
        assert order == ["before", "sleep", "event", "run", "event", "wait"]

    def test_a_gpus_peak_is_what_a_run_adds(self, monkeypatch):
        figures = {"synchronize": None, "memory_allocated": 100, "reset_peak_memory_stats": None, "max_memory_allocated": 250}
        for name, result in figures.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, result=result: result)
        assert clock.rehearse(Work(lambda _: {}), torch.device("cuda"), lambda work: 0.5) == (150, 0.5)

    def test_saved_bytes_leave_out_what_is_ignored(self):
        x, weight = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
        work = Work(lambda _: {}, forward=lambda: x * weight, ignored=[weight])
        assert harness._saved(work) == {"saved_bytes": 32}

    def test_a_spent_budget_stops_between_cases_and_keeps_what_there_is(self, tmp_path, capsys):
        budget = Budget(60)

        def last(length: int) -> Work:
            budget._end = 0
            return Work(lambda _: {"y": torch.linspace(1, 2, length) * 2})

        cases = [doubling(name="first"), doubling(last, name="second"), doubling(name="third")]
        report = harness.run("demo", cases, CPU, budget, tmp_path)
        assert not report["complete"] and {row["case"] for row in report["rows"]} == {"first", "second"}
        assert json.loads((tmp_path / "demo.json").read_text()) == report
        assert "third and what follows: not run" in capsys.readouterr().out

    def test_no_provider_begins_after_the_end(self):
        assert {row["status"] for row in rows(doubling(), 0).values()} == {"not run"}

    def test_results_are_written_after_each_case(self, tmp_path):
        seen = []

        def look(length: int) -> Work:
            seen.append(json.loads((tmp_path / "demo.json").read_text()))
            return Work(lambda _: {"y": torch.linspace(1, 2, length) * 2})

        harness.run("demo", [doubling(look, name="first"), doubling(look, name="second")], CPU, Budget(60), tmp_path)
        assert [len(report["rows"]) for report in seen] == [0, 0, 2, 2] and not seen[-1]["complete"]

    def test_a_case_that_cannot_be_made_does_not_end_the_run(self, tmp_path):
        def fail(length: int):
            raise RuntimeError("no truth")

        broken = Case("broken", 1, 1, fail, fail, {}, 1e-3)
        report = harness.run("demo", [broken, doubling()], CPU, Budget(60), tmp_path)
        assert report["complete"] and [row["status"] for row in report["rows"]] == ["failed", "ok", "ok"]

    def test_header_and_note(self, tmp_path):
        report = harness.run("demo", [], CPU, Budget(60), tmp_path)
        assert report["note"] == harness.CPU_NOTE
        assert {"device", "cpu", "torch", "triton", "ckpt_ext", "extension", "commit", "date", "transformers"} <= report["machine"].keys()
        assert report["machine"]["torch"] == torch.__version__

    def test_ceilings_are_rates(self):
        found = clock.ceilings(CPU)
        assert 0 < found["tflops"] < 1e3 and 0 < found["gb_per_s"] < 1e5

    @pytest.mark.parametrize("rich", [True, False])
    def test_table(self, rich, monkeypatch, capsys):
        if not rich:
            monkeypatch.setitem(sys.modules, "rich", None)
        case = doubling()
        case.providers["third"] = Provider(None, "not installed")
        harness.show(harness.measure(case, CPU, Budget(60)), "a title")
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("a title", "ours", "peak MiB", "third", "absent: not installed"))
        assert "tokens/s" not in shown, "no column without figures"


def report_of(*cases: Case) -> dict:
    measured = [row for case in cases for row in harness.measure(case, CPU, Budget(60))]
    return {
        "benchmark": "demo", "note": "a note", "complete": True, "rows": measured,
        "machine": {"device": "cpu", "torch": "2", "triton": "3", "commit": "abc", "date": "2026-12-02T00:00:00"},
    }  # fmt: skip


def test_picture(tmp_path):
    """From what a JSON file holds, by the command; nothing else is needed."""
    (tmp_path / "demo.json").write_text(json.dumps(report_of(doubling(bytes=1e6), doubling(name="again", flops=1e6))))
    done = subprocess.run([sys.executable, "-m", "bench.plot", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_no_picture_of_nothing_or_without_matplotlib(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="nothing was timed"):
        plot.draw([report_of()], tmp_path / "report.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    harness.draw_or_say_why([report_of(doubling())], tmp_path / "report.png")
    assert "no report.png: import of matplotlib" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_peers_that_are_missing_say_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    provider = peers.liger(CPU, lambda module, shape: None)
    assert provider.prepare is None and "liger_kernel cannot be imported" in provider.absent


def test_attention_saved_does_not_run_attention_again():
    shape = block.Shape(block.SMALL, 16, torch.float32, CPU)
    model, (x, grad) = block.build(block.EagerBlock, shape), block.inputs(shape)

    class Attentions(TorchDispatchMode):
        """Counts those that are computed: a mode that lies further in, as selective checkpointing's, answers the rest by itself."""

        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.name() in {f"aten::{name}" for name in peers.SDPA_OPERATORS}
            return func(*args, **(kwargs or {}))

    def forwards(run) -> int:
        with Attentions() as attentions:
            run(model, x.requires_grad_()).backward(grad)
        return attentions.count

    assert forwards(peers.checkpointed) == 2 and forwards(peers.attention_saved) == 1


# Tiny runs of each benchmark. Warnings are torch's and transformers' own.


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "benchmark, match", [(kernels, "^(SwiGLU|rms norm|swiglu|dropout|rope|attention forward)"), (block, ""), (training, "")]
)
def test_every_benchmark_runs(benchmark, match, tmp_path, capsys):
    name = benchmark.__name__.rpartition(".")[2]
    options = {} if name == "kernels" else {option: {"default": getattr(ARGUMENTS, option)} for option in ("lengths", "layers")}
    code = harness.main(name, "", benchmark.cases, ["--device", "cpu", "--match", match, "--out", str(tmp_path)], **options)
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["complete"] and code == 0, capsys.readouterr().out
    assert {row["status"] for row in report["rows"] if row["ours"]} == {"ok"}
    assert not [row for row in report["rows"] if row["status"] not in ("ok", "absent")]
    assert (tmp_path / f"{name}.png").exists()


@pytest.mark.slow
def test_gpu_check_goes_through_its_steps(tmp_path):
    """The script itself, with the shortest of its benchmarks; the build and the tests it would run have tests of their own."""
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    command = ["bash", "bench/gpu_check.sh", "--dry-run", "--steps", "training,plot"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "summary.txt").read_text().split()
    assert summary[:2] == ["training", "passed"] and summary[4:6] == ["plot", "passed"]
    assert {"training.json", "log.txt", "report.png", "summary.txt"} <= {path.name for path in tmp_path.iterdir()}


def test_gpu_check_says_how_a_step_ended(tmp_path):
    """A step that fails and one for which no time is left make the whole fail."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": str(python), "LIMIT": "30"}
    for limit, outcome in (("30", "failed"), ("3", "not run")):
        command = ["bash", "bench/gpu_check.sh", "--dry-run", "--steps", "kernels"]
        done = subprocess.run(command, cwd=ROOT, env=environment | {"LIMIT": limit}, capture_output=True, text=True)
        assert done.returncode == 1
        assert (tmp_path / "out" / "summary.txt").read_text().startswith(f"kernels    {outcome}")
