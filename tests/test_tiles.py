"""The tables of tiles: which row a device takes, and that every row is one that a GPU can run."""

import itertools
import subprocess
import sys

import pytest
import torch

from ckpt_ext.kernels import architecture, tiles
from ckpt_ext.kernels.launch import record_launches
from ckpt_ext.kernels.rope import rotate

ARCHITECTURES = architecture.NVIDIA + architecture.AMD
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
META = torch.device("meta")
ATTENTION = [tiles.attention_forward_tile, tiles.attention_backward_tile]
ROWS = [tiles.norm_tile, tiles.norm_backward_tile, tiles.elementwise_tile]


@pytest.fixture
def compiled(monkeypatch):
    """Tiles as a process without the interpreter chooses them."""
    monkeypatch.setattr(tiles, "INTERPRETED", False)


@pytest.mark.parametrize(
    "capability, arch",
    {
        (8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_86", (8, 9): "sm_86", (9, 0): "sm_90",
        (10, 0): "sm_100", (10, 3): "sm_100", (11, 0): "sm_100", (12, 0): "sm_120", (12, 1): "sm_120", (13, 0): "sm_120",
    }.items(),
)  # fmt: skip
def test_nearest_architecture_below(capability, arch):
    assert architecture.nearest_architecture(*capability) == arch


def test_older_gpus_are_refused():
    with pytest.raises(NotImplementedError, match="8.0 or later, got 7.5"):
        architecture.nearest_architecture(7, 5)


def test_architecture_asks_the_device_once(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (8, 9))
    architecture._architecture.cache_clear()
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]
    assert [architecture.architecture(device) for device in devices] == ["sm_86"] * 3
    assert asked == devices[:2]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    architecture._architecture.cache_clear()
    assert architecture.architecture(devices[0]) == "gfx942"
    architecture._architecture.cache_clear()


def test_recorded_launches_have_the_tiles_of_the_architecture_asked_for(monkeypatch):
    seen = []

    def rope_tile(half, dtype, device):
        seen.append(architecture.architecture(device))
        return tiles.Tile(16, 16)

    monkeypatch.setattr("ckpt_ext.kernels.rope.rope_tile", rope_tile)
    x, angle = torch.empty(1, 2, 8, 16, device=META), torch.empty(8, 8, device=META)
    for arch in ARCHITECTURES:
        with record_launches(arch) as launches:
            rotate(x, angle, angle)
        assert len(launches) == 1
    assert seen == list(ARCHITECTURES)
    assert architecture._assumed.get() is None


def test_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="arch must be one of sm_80, .*, got 'sm_75'"), record_launches("sm_75"):
        pass


def test_the_interpreter_has_its_own_tiles():
    for function, dropout, bounded in itertools.product(ATTENTION, (False, True), (False, True)):
        assert function(128, torch.float32, META, dropout=dropout, bounded=bounded) == tiles.INTERPRETER_TILE
    for function in ROWS:
        assert function(4096, torch.float32, META) == tiles.INTERPRETER_ROW_TILE


def is_power_of_two(number):
    return number > 0 and number & (number - 1) == 0


def check(tile, arch):
    assert is_power_of_two(tile.block_m) and is_power_of_two(tile.block_n) and is_power_of_two(tile.num_warps)
    assert tile.num_stages >= 1
    assert tile.num_warps * (64 if arch in architecture.AMD else 32) <= 1024  # the threads of a program


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("function", ATTENTION, ids=lambda function: function.__name__)
def test_attention_has_a_tile_for_every_head(compiled, arch, function):
    with architecture.assume_architecture(arch):
        widths, flags = (16, 40, 64, 80, 96, 128, 192, 256), (False, True)
        for head_dim, dtype, dropout, bounded, extras in itertools.product(widths, DTYPES, flags, flags, (0, 1, 2)):
            tile = function(head_dim, dtype, META, dropout=dropout, bounded=bounded, extras=extras)
            check(tile, arch)
            assert min(tile.block_m, tile.block_n) >= 16  # a matrix product takes no less
            plain = function(head_dim, dtype, META, dropout=False, bounded=False)
            assert tile.block_m * tile.block_n <= plain.block_m * plain.block_n  # a mask never makes room


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_have_a_tile_for_every_width(compiled, arch):
    with architecture.assume_architecture(arch):
        for function, cols, dtype in itertools.product(ROWS, (1, 3, 128, 1000, 4096, 16384, 65536, 200_000), DTYPES):
            tile = function(cols, dtype, META)
            check(tile, arch)
            assert tile.block_n % 4 == 0  # four neighbours share a Philox call
        for half, dtype in itertools.product((1, 20, 32, 64, 128), DTYPES):
            tile = tiles.rope_tile(half, dtype, META)
            check(tile, arch)
            assert tile.block_n >= half
        check(tiles.column_sum_tile(META), arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_norm_backward_has_no_more_programs_than_rows(compiled, arch):
    with architecture.assume_architecture(arch):
        tile = tiles.norm_backward_tile(4096, torch.bfloat16, META)
        for blocks in (1, 7, 100, 10_000, 10_000_000):
            assert 1 <= tiles.norm_backward_programs(blocks, 1, tile, META) <= blocks
        assert tiles.norm_backward_programs(0, 1, tile, META) == 0
        most = tiles.norm_backward_programs(10_000_000, 1, tile, META)
        assert tiles.norm_backward_programs(20_000_000, 1, tile, META) == most  # partial sums do not grow with the rows


def test_tiles_do_not_depend_on_what_ran_before():
    """A replay in another process takes the same tiles: nothing is tuned, and nothing is remembered."""
    probe = (
        "import torch; from ckpt_ext.kernels import architecture, tiles\n"
        "with architecture.assume_architecture('sm_90'):\n"
        "    print(*(tiles.attention_forward_tile(d, torch.bfloat16, torch.device('meta'), dropout=False, bounded=False) for d in {order}))"
    )
    results = []
    for order in ((64, 128, 256), (256, 128, 64)):
        command = [sys.executable, "-c", probe.format(order=order)]
        results.append(subprocess.run(command, capture_output=True, text=True, check=True, env={}).stdout.split("Tile")[1:])
    assert [text.strip() for text in results[0]] == [text.strip() for text in results[1][::-1]]
