"""What fits: estimates against whole steps that are run without data, the search, budgets by hand, published runs, and the command."""

import json
from dataclasses import replace

import pytest
import torch

from ckpt_ext import BlockSpec, Policy, TransformerBlock, checkpoint_sequential, cli, functional, rope
from ckpt_ext import budget as budgets
from ckpt_ext.budget import Training, format_bytes, head_bytes, holdings, parse_bytes
from ckpt_ext.fit import METHODS, PARTS, Method, Search, estimate, fit, largest
from ckpt_ext.fit_report import as_markdown, limits
from ckpt_ext.ladder import RECIPES, Rung, ladder
from ckpt_ext.memory import LiveStorages
from ckpt_ext.shapes import ModelShape, from_config, load
from ckpt_ext.slicing import spans
from ckpt_ext.tracing import fake_tensors

SPECS = tuple(BlockSpec(dim=64, heads=4, kv_heads=2, hidden_dim=hidden, rope_theta=1e4) for hidden in (160, 160, 96, 256))
SHAPE = ModelShape("small", SPECS, 500, False)
DEEP = ModelShape("deep", SPECS[:1] * 12, 20, False)
LENGTH = 3000


def run_ours(shape, method, length, segments):
    """The most that is alive in a step of our blocks and loss on meta tensors, with parameters; and of that in the host's memory."""
    dtype = torch.bfloat16
    blocks = [TransformerBlock(spec, policy=method.policy, dtype=dtype, device="meta") for spec in shape.layers]
    embedding = torch.nn.Embedding(shape.vocab, shape.dim, dtype=dtype, device="meta")
    norm = torch.nn.RMSNorm(shape.dim, dtype=dtype, device="meta")
    head = embedding if shape.tied else torch.nn.Linear(shape.dim, shape.vocab, bias=False, dtype=dtype, device="meta")
    symbols = torch.empty(1, length, dtype=torch.int64, device="meta")
    parameters = [p for part in (*blocks, embedding, norm, head) for p in part.parameters()]
    table = rope.table(shape.layers[0], length, dtype, symbols.device)
    memory = LiveStorages([*parameters, symbols, *table])
    with memory:
        x = embedding(symbols)
        for size in segments:
            x, blocks = checkpoint_sequential(blocks[:size], x, segments=1) if size > 1 else blocks[0](x), blocks[size:]
        rows = functional.norm(x, norm.weight)
        del x
        loss = functional.linear_cross_entropy(rows, head.weight, symbols)
        del rows
        loss.backward()
    fixed = sum(p.nbytes for p in {id(p): p for p in parameters}.values()) + sum(t.nbytes for t in table) + 2 * symbols.nbytes
    return memory.peak + fixed, memory.host_peak


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocab", [500, 40_000], ids=["blocks", "head"])
@pytest.mark.parametrize("method", [METHODS[2], METHODS[3], Method("all", policy=Policy("all"))], ids=lambda method: method.name)
def test_an_estimate_is_what_a_step_takes(method, vocab, tied):
    shape, training = replace(SHAPE, vocab=vocab, tied=tied), Training("none")
    found = estimate(shape, method, training, 1, LENGTH)
    real, _ = run_ours(shape, method, LENGTH, found.segments)
    assert real <= found.peak <= 1.002 * real


@pytest.mark.parametrize("vocab", [20, 40_000], ids=["blocks", "head"])
@pytest.mark.parametrize("host_memory", [None, 6 * LENGTH * 64 * 2], ids=["blocks one by one", "segments"])
def test_an_estimate_with_inputs_on_the_host_is_an_upper_bound(vocab, host_memory):
    """Of what may wait at a time the most is counted, here up to four inputs."""
    shape, training = replace(DEEP, vocab=vocab), Training("none")
    found = estimate(shape, METHODS[5], training, 1, LENGTH, host_memory=host_memory)
    real, host = run_ours(shape, METHODS[5], LENGTH, found.segments)
    assert real <= found.peak <= real + 2 * LENGTH * 64 * 2
    assert host <= found.host <= host + LENGTH * 64 * 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.name)
def test_an_estimate_is_what_a_step_of_transformers_takes(monkeypatch, method):
    transformers = pytest.importorskip("transformers")
    # Of tensors without data it cannot see that none is needed.
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: None)
    length = 1000
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, vocab_size=3000,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    shape = from_config(config.to_dict(), "llama")
    with fake_tensors():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        if method.blocks == "torch checkpoint":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False})
        symbols = torch.zeros(1, length, dtype=torch.int64)
        with LiveStorages([*model.parameters(), symbols]) as memory:
            loss = model(input_ids=symbols, labels=symbols).loss
            loss.backward()
        real = memory.peak + sum(p.nbytes for p in model.parameters())
    assert estimate(shape, method, Training("none"), 1, length).peak == pytest.approx(real, rel=0.05)


def test_state_and_gradients_by_hand():
    shape, matrix = SHAPE, 500 * 64
    count = shape.parameters
    for optimizer, each in {"none": 0, "adamw": 4, "adamw-fp32": 12, "adamw-8bit": 2 + 1 / 32, "offloaded": 0}.items():
        assert holdings(shape, Training(optimizer)).states == pytest.approx(each * count, abs=1)
    held = holdings(shape, Training())
    assert held.parameters == 2 * count
    assert sum(held.block_gradients) + held.head_gradients + held.embedding_rest == 2 * count
    assert held.embedding_gradients == 2 * matrix
    assert holdings(replace(shape, tied=True), Training()).embedding_rest == 0
    offloaded = holdings(shape, Training("offloaded", offload_weights=True))
    assert sum(offloaded.block_gradients) == offloaded.head_gradients == 0
    assert offloaded.host == count * (12 + 2 + 2)
    assert offloaded.parameters == 2 * max(2 * max(shape.layer_parameters), matrix)


def test_adapters_are_all_that_is_trained():
    held = holdings(SHAPE, Training(rank=4))
    layer = 4 * sum((64 + 64, 32 + 64, 32 + 64, 64 + 64, 160 + 64, 160 + 64, 64 + 160))
    assert held.block_gradients[0] == 2 * layer
    assert held.states == 2 * sum(held.block_gradients)
    assert held.parameters == 2 * SHAPE.parameters + sum(held.block_gradients)
    assert held.head_gradients == held.embedding_gradients == 0


def test_adafactor_keeps_rows_and_columns():
    states = holdings(SHAPE, Training("adafactor")).states
    layers = sum(64 + 64 + 2 * (32 + 64) + 64 + 64 + 3 * (spec.hidden_dim + 64) + 2 * 64 for spec in SPECS)
    assert states == 4 * (layers + 2 * (500 + 64) + 64)


def test_shards_divide_what_is_held_and_gather_what_is_at_work():
    whole, shared = holdings(SHAPE, Training()), holdings(SHAPE, Training(shards=4))
    assert shared.states == whole.states // 4 and shared.block_gradients[0] == whole.block_gradients[0] // 4
    assert shared.parameters == whole.parameters // 4 + 2 * max(2 * max(SHAPE.layer_parameters), 500 * 64)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("tokens", [700, 3000, 5000])
def test_the_loss_counts_as_much_with_few_of_its_tiles(monkeypatch, tokens, trained):
    arguments = (SPECS[0], 3000, 20.0, 1, tokens, "tiled", torch.bfloat16, trained)
    monkeypatch.setitem(budgets.cross_entropy._TILE_BYTES, "other", 2 << 20)  # or there would be one tile
    head_bytes.cache_clear()
    few = head_bytes(*arguments)
    monkeypatch.setattr(budgets, "_unlike_spans", spans)
    head_bytes.cache_clear()
    assert few == head_bytes(*arguments)
    head_bytes.cache_clear()


def test_whole_logits_take_a_dozen_bytes_each():
    """In bfloat16: log-probabilities, their gradient, and that of the logits in float32; the copy in float32 is gone by then."""
    found = head_bytes(SPECS[0], 50_000, None, 1, 4096, "logits", torch.bfloat16, False)
    assert found.backward == pytest.approx(12 * 50_000 * 4096, rel=0.02)


@pytest.mark.parametrize("method", METHODS[:5], ids=lambda method: method.name)
def test_what_is_found_fits_and_one_step_more_does_not(method):
    memory, search = 40_000_000, Search(step=64)
    for training in (Training(rank=4), Training(accumulate=True)):
        cell = fit(SHAPE, [memory], [training], search, methods=[method]).cells[0]
        usable = memory - memory * 5 // 100
        assert cell.found > 0 and cell.estimate.peak == sum(cell.estimate.parts.values()) <= usable
        assert set(cell.estimate.parts) == set(PARTS)
        step = 64 if cell.found >= 16 * 64 else 4
        assert cell.found % step == 0
        assert estimate(SHAPE, method, training, 1, cell.found + step).peak > usable


def test_the_largest_batch_at_a_length():
    cell = fit(SHAPE, [40_000_000], [Training()], Search(length=256), methods=[METHODS[2]]).cells[0]
    assert estimate(SHAPE, METHODS[2], Training(), cell.found, 256).peak <= 38_000_000
    assert estimate(SHAPE, METHODS[2], Training(), cell.found + 1, 256).peak > 38_000_000


def test_less_memory_is_needed_from_method_to_method():
    needs = [estimate(DEEP, method, Training("none"), 1, 4096).peak for method in METHODS[:5]]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == 5


def test_host_memory_bounds_what_is_offloaded():
    method, row = METHODS[5], 64 * 2
    wide = estimate(DEEP, method, Training("none"), 1, 4096)
    assert wide.segments == (1,) * 12 and wide.host == 12 * 4096 * row
    narrow = estimate(DEEP, method, Training("none"), 1, 4096, host_memory=wide.host // 2)
    assert narrow.segments == (2,) * 6 and narrow.host == wide.host // 2 and narrow.peak > wide.peak
    search = Search(step=64, host_memory=5_000_000)
    alone, cut = fit(DEEP, [20_000_000], [Training("none")], search, methods=METHODS[4:]).cells
    assert alone.estimate.host <= 5_000_000 and cut.estimate.host <= 5_000_000
    assert alone.found == 5_000_000 // (12 * row) // 64 * 64 < cut.found


def test_accumulated_gradients_are_there_from_the_start():
    once, often = (estimate(SHAPE, METHODS[2], Training("none", accumulate=flag), 1, 512) for flag in (False, True))
    assert often.parts["gradients"] == 2 * SHAPE.parameters > once.parts["gradients"]


def test_the_search_finds_the_end_of_any_rising_need():
    for need in (lambda n: 3 * n, lambda n: n * n, lambda n: 100 + (n // 7) * 50, lambda n: n**3 + 5, lambda n: 7):
        for limit in (2, 106, 107, 4000, 123456):
            asked = []
            found = largest(lambda n, need=need, asked=asked: asked.append(n) or need(n), limit, 100_000)
            assert found == max((n for n in range(1, 100_001) if need(n) <= limit), default=0)
            assert len(asked) < 60
    known = {}
    assert [largest(lambda n: 3 * n, limit, 1000, known) for limit in (300, 3, 299, 9000)] == [100, 1, 99, 1000]


def test_published_runs_are_near_what_is_counted():
    """Within the third that the recipes leave open: DeepSpeed's buffers, and kernels leaner than the layer that is counted."""
    rungs = ladder()
    for recipe, rung in zip(RECIPES, rungs, strict=False):
        if recipe.method is not None:
            assert 0.7 < rung.found / recipe.published < 1.35, rung
    assert rungs[-1].found > 1_200_000


def test_why_nothing_fits():
    table = fit(load("llama-3.1-8b"), [parse_bytes("24GB")], [Training()], Search(), methods=METHODS[:3])
    assert [cell.found for cell in table.cells] == [0, 0, 0]
    assert limits(table, Training()) == ["24.0 GB: parameters, gradients and optimizer state alone take 63.2 GB"]
    small = fit(SHAPE, [1_500_000], [Training("none")], Search(), methods=METHODS[:3])
    assert "the least that was tried takes" in limits(small, Training("none"))[0]


@pytest.mark.parametrize("text, size", [
    ("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("24 gb", 24 * 10**9), ("1.5TiB", 3 * 2**39), ("10kb", 10_000), ("7", 7), ("7B", 7),
])  # fmt: skip
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "24 XB", "-1GB", "0", "1e9", "24G B"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="a size must be a positive number and a unit"):
        parse_bytes(text)


def test_sizes_are_shown():
    assert [format_bytes(size) for size in (12, 2_500, 24 * 10**9, 3 * 10**12)] == ["12 B", "2.5 KB", "24.0 GB", "3.0 TB"]


@pytest.mark.parametrize("make, message", [
    (lambda: Training("sgd"), "optimizer must be one of 'adamw'"), (lambda: Training(rank=-1), "rank must be a positive int"),
    (lambda: Training(shards=0), "shards must be a positive int"), (lambda: Search(batch=0), "batch must be a positive int"),
    (lambda: Search(host_memory=0), "host_memory must be a positive int"), (lambda: Search(reserve=-0.1), "reserve must be a share"),
])  # fmt: skip
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def model(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512,
    }  # fmt: skip
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_command_prints_and_writes(model, tmp_path, capsys):
    out = tmp_path / "made" / "here"
    assert cli.main(["fit", model, "--memory", "20MB", "1KB", "--step", "512", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "ours: input, offload" in printed.out and "nothing fits in 1.0 KB" in printed.out
    report = json.loads((out / "report.json").read_text())
    assert len(report["cells"]) == 2 * 2 * len(METHODS)
    found = [cell["found"] for cell in report["cells"] if cell["memory"] == 20_000_000]
    assert all(found) and found[0] < found[1] < found[2] <= found[4]
    assert (out / "report.md").read_text().count("\n| ") == 2 * (1 + len(METHODS))
    assert "--out" not in report["command"]


def test_the_command_prints_json(model, capsys):
    assert cli.main(["fit", model, "--memory", "20MB", "--train", "adapters", "--length", "64", "--reserve", "1MB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["search"]["reserve"] == 1_000_000 and report["search"]["length"] == 64
    assert {cell["training"]["rank"] for cell in report["cells"]} == {16}


@pytest.mark.parametrize("arguments, message", [
    (["no-such", "--memory", "1GB"], "model must be a directory"), (["llama-3.1-8b", "--memory", "1XB"], "a size must be"),
    (["llama-3.1-8b", "--memory", "1GB", "--reserve", "x"], "a size must be"), (["llama-3.1-8b", "--memory", "1GB", "--step", "0"], "step"),
])  # fmt: skip
def test_the_command_refuses(capsys, arguments, message):
    assert cli.main(["fit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_report_has_the_published_runs():
    table = fit(SHAPE, [40_000_000], [Training()], Search(step=64), methods=[METHODS[2]])
    rungs = [Rung("a", 65_000, 137.4, 70_000, 111.1), Rung("b", 7, 1.0, None, None), Rung("c", 0, 0.0, 9, 2.0)]
    lines = as_markdown(table, "x", rungs).splitlines()[-3:]
    assert lines[0] == "- a: published 65,000 tokens at 137.4 GiB; counted 70,000 tokens, 111.1 GiB at that length"
    assert lines[1:] == ["- b: published 7 tokens at 1.0 GiB; not counted", "- c: nothing published; counted 9 tokens"]
