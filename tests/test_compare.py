"""What `compare` measures, on sizes of a second or two, and that its verdicts can fail."""

import dataclasses
import math

import pytest
import torch

from ckpt_ext import EagerBlock, TransformerBlock, compare_report, text
from ckpt_ext import compare as comparing
from ckpt_ext.compare import ALL, INPUT, OURS, PLAIN, TORCH, compare, difference, windows
from ckpt_ext.compare_config import Config

TINY = Config(blocks=2, dim=16, heads=2, kv_heads=1, length=24, batch=2, steps=4, warmup=2)
INPUT_BYTES = 2 * 24 * 16 * 4


def measure(config=TINY):
    comparison = compare(config, windows(config))
    return comparison, {run.name: run for run in comparison.runs}


def failed(comparison):
    """Claims that failed, but for those about memory and time: at these sizes a run is all overhead."""
    return [v.claim for v in comparison.verdicts if v.ok is False and "peaks" not in v.claim and "step time" not in v.claim]


@pytest.fixture(scope="module")
def measured():
    return measure()


def test_all_runs_are_there_and_agree(measured):
    comparison, runs = measured
    assert list(runs) == [PLAIN, TORCH, *OURS]
    assert failed(comparison) == []
    assert comparison.ok
    assert all(len(run.losses) == TINY.steps and all(map(math.isfinite, run.losses)) for run in comparison.runs)
    assert all(run.step_seconds > 0 and run.peak_bytes >= run.saved_bytes >= 0 for run in comparison.runs)


def test_torch_checkpoint_replays_the_plain_run_bit_by_bit(measured):
    _, runs = measured
    assert runs[TORCH].gradient_difference.value == 0
    assert runs[TORCH].losses == runs[PLAIN].losses


def test_ours_are_bit_equal_with_dropout_on(measured):
    _, runs = measured
    assert TINY.residual_dropout > 0 and TINY.mlp_dropout > 0
    for name in OURS:
        assert runs[name].bit_equal
        assert runs[name].losses == runs[ALL].losses
        assert 0 < runs[name].gradient_difference.value < 1e-5


def test_saved_bytes_are_exact(measured):
    _, runs = measured
    assert runs[INPUT].saved_bytes == TINY.blocks * (INPUT_BYTES + 16)
    assert runs[TORCH].saved_bytes == TINY.blocks * INPUT_BYTES
    assert runs["ours: attention"].saved_bytes == TINY.blocks * (2 * INPUT_BYTES + 2 * 24 * 2 * 4 + 16)
    assert runs[PLAIN].saved_bytes > runs[ALL].saved_bytes > runs["ours: attention"].saved_bytes


def test_the_same_config_gives_the_same_losses_and_another_seed_others(measured):
    _, runs = measured
    assert measure()[1][INPUT].losses == runs[INPUT].losses
    assert measure(dataclasses.replace(TINY, seed=1))[1][INPUT].losses != runs[INPUT].losses


def test_the_callers_generator_and_threads_are_left_alone():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    measure(dataclasses.replace(TINY, steps=1, threads=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "changes",
    [{"attn_dropout": 0.2}, {"residual_dropout": 0.0, "mlp_dropout": 0.0}, {"dtype": "float64"}, {"dtype": "bfloat16"}, {"steps": 1}],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_other_configurations(changes):
    comparison, _ = measure(dataclasses.replace(TINY, **changes))
    assert failed(comparison) == []


def test_phases_are_counted():
    seen = []
    compare(TINY, windows(TINY), seen.append)
    assert len(seen) == comparing.phases(TINY) + 1
    assert seen.count("training") == TINY.steps


class TwiceTheGradient(TransformerBlock):
    """A block whose output is right and whose gradients are not."""

    def forward(self, x):
        y = super().forward(x)
        return 2 * y - y.detach()


class UnequalAmongThemselves(TransformerBlock):
    """A block that rounds otherwise where it recomputes everything."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-6 if self.policy.save == "input" else 1)


class Forgetful(TransformerBlock):
    """A block that keeps more than it says."""

    def forward(self, x):
        return super().forward(x) + x.sigmoid() * 0


def plant(monkeypatch, kind):
    """Make all our blocks of this kind. Segments take none but plain ones."""
    monkeypatch.setattr(comparing, "TransformerBlock", kind)
    monkeypatch.setattr(comparing, "OURS", {name: scheme for name, scheme in OURS.items() if scheme.segments is None})


def test_recomputed_products_are_counted(measured):
    _, runs = measured
    tokens, dim, hidden = 2 * 24, TINY.spec.dim, TINY.spec.hidden_dim
    # Each of q, k (half as wide), v, out, gate and up once more: of the projections only the last one is left out.
    projections = 2 * tokens * dim * (2 * dim + 2 * dim // 2 + 2 * hidden)
    attention = 2 * 2 * 2 * 24 * 24 * dim
    assert runs[PLAIN].recomputed_flops == runs[ALL].recomputed_flops == 0
    assert runs["ours: attention"].recomputed_flops == TINY.blocks * projections
    assert runs[INPUT].recomputed_flops == runs["ours: offload"].recomputed_flops == TINY.blocks * (projections + attention)
    assert runs[TORCH].recomputed_flops >= runs[INPUT].recomputed_flops


def test_the_peak_is_split(measured):
    comparison, runs = measured
    parameters = runs[PLAIN].ledger.parameters
    assert all(run.ledger.parameters == parameters > 0 for run in comparison.runs)
    assert all(run.ledger.peak >= parameters + run.saved_bytes for run in comparison.runs)
    assert runs[PLAIN].ledger.saved > runs[TORCH].ledger.saved
    text = compare_report.as_markdown(comparison)
    assert f"| {PLAIN} | {parameters / 2**20:.2f} |" in text


def test_a_plan_is_one_more_run(tmp_path):
    from ckpt_ext.costs import BlockCosts, Cost
    from ckpt_ext.plan import solve
    from ckpt_ext.spec import Policy

    costs = {Policy("input"): Cost(10, 30, 40, 3.0), Policy("all"): Cost(30, 30, 40, 2.0)}
    solve([BlockCosts(10, 0, 1.0, costs)] * 2, budget=100).save(tmp_path / "plan.json")
    config = dataclasses.replace(TINY, plan=str(tmp_path / "plan.json"))
    comparison, runs = measure(config)
    assert failed(comparison) == [] and runs[comparing.PLANNED].bit_equal
    assert "--plan" in config.arguments()
    with pytest.raises(ValueError, match="plan must be for blocks=3, got one for 2"):
        dataclasses.replace(config, blocks=3)


def test_wrong_gradients_fail(monkeypatch):
    plant(monkeypatch, TwiceTheGradient)
    comparison, runs = measure()
    assert not comparison.ok
    assert any("float64" in claim for claim in failed(comparison))
    assert runs[INPUT].gradient_difference.value > 0.1


def test_gradients_that_are_no_numbers_fail(monkeypatch):
    class NoNumbers(TransformerBlock):
        def forward(self, x):
            return super().forward(x) * torch.nan

    plant(monkeypatch, NoNumbers)
    comparison, _ = measure(dataclasses.replace(TINY, steps=1))
    assert not comparison.ok
    assert any("float64" in claim for claim in failed(comparison))
    assert "all runs end at the same loss" in failed(comparison)


def test_unequal_bits_fail(monkeypatch):
    plant(monkeypatch, UnequalAmongThemselves)
    comparison, runs = measure()
    assert not comparison.ok
    assert "ours give the same bits, whatever is kept" in failed(comparison)
    assert not runs[INPUT].bit_equal and runs["ours: attention"].bit_equal


def test_a_block_that_keeps_too_much_is_told_but_does_not_fail_the_comparison(monkeypatch):
    plant(monkeypatch, Forgetful)
    comparison, _ = measure(dataclasses.replace(TINY, steps=1))
    assert comparison.ok
    assert f"{INPUT} saves the input of each block and at most 64 bytes" in failed(comparison)


def test_losses_that_part_are_told(measured):
    _, runs = measured
    runs = runs | {TORCH: dataclasses.replace(runs[TORCH], final_loss=runs[TORCH].final_loss + 2e-4)}
    verdicts = {verdict.claim: verdict.ok for verdict in comparing.judge(TINY, runs)}
    assert verdicts["all runs end at the same loss"] is False


def test_memory_and_time_above_torch_checkpoints_are_told(measured):
    _, runs = measured
    runs = runs | {INPUT: dataclasses.replace(runs[INPUT], peak_bytes=runs[TORCH].peak_bytes, step_ratio=1.2)}
    verdicts = {verdict.claim: verdict.ok for verdict in comparing.judge(TINY, runs)}
    assert verdicts[f"{INPUT} peaks below {TORCH}"] is False
    assert verdicts[f"{INPUT} takes at most 1.1 of {TORCH}'s step time"] is False


def test_speed_is_not_judged_under_the_interpreter(measured):
    _, runs = measured
    runs = runs | {INPUT: dataclasses.replace(runs[INPUT], step_ratio=100.0)}
    verdict = comparing.judge(dataclasses.replace(TINY, backend="triton"), runs)[-1]
    assert verdict.ok is None and "interpreter" in verdict.detail


def test_difference():
    expected = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(2)}
    assert difference({"a": torch.tensor([1.0, -3.0]), "b": torch.zeros(2)}, expected) == (0.25, "a")
    assert difference({"a": expected["a"], "b": torch.ones(2)}, expected) == (math.inf, "b")
    assert difference({"a": torch.full((2,), torch.nan), "b": torch.zeros(2)}, expected) == (math.inf, "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 0}, "blocks must be a positive int, got 0"),
        ({"steps": -1}, "steps must be a positive int, got -1"),
        ({"lr": 0.0}, "lr must be positive, got 0.0"),
        ({"threads": -1}, "threads must be between 0 and the .* of this machine, got -1"),
        ({"heads": 3}, "dim must be a multiple of heads=3"),
        ({"mlp_dropout": 1.5}, "mlp_dropout must be a probability"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(RuntimeError, match=f"device '{device}' must be usable"):
        dataclasses.replace(TINY, device=device)


def test_arguments_give_the_config_again():
    assert Config().arguments() == []
    assert Config(kv_heads=2, lr=0.01).arguments() == ["--kv-heads", "2", "--lr", "0.01"]


def test_the_text_is_prose_and_batches_are_windows_of_it():
    prose = text.read()
    assert len(prose) > 300_000 and b"statement" in prose
    batches = text.batches(prose, count=3, batch=2, length=50, seed=0)
    assert batches.shape == (3, 2, 51)
    assert all(bytes(window.tolist()) in prose for window in batches.flatten(0, 1))
    assert torch.equal(batches, text.batches(prose, count=3, batch=2, length=50, seed=0))


@pytest.mark.parametrize("content", [b"", b"x" * 24])
def test_a_text_shorter_than_a_window_is_refused(content):
    with pytest.raises(ValueError, match=f"text must have more than length=24 bytes, got {len(content)}"):
        text.batches(content, count=1, batch=1, length=24, seed=0)


def test_a_text_of_one_window_is_enough():
    assert text.batches(bytes(range(25)), count=2, batch=1, length=24, seed=0).tolist() == [[list(range(25))]] * 2


def test_a_missing_matplotlib_is_told(monkeypatch, tmp_path, measured):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="pip install"):
        compare_report.draw(measured[0], tmp_path / "memory.png")


def test_the_stock_runs_are_eager_blocks():
    runs = comparing._runs(TINY, torch.device("cpu"))
    assert {type(block) for name in (PLAIN, TORCH) for block in runs[name].model.blocks} == {EagerBlock}
    assert runs[TORCH].model.checkpointed and not runs[PLAIN].model.checkpointed
