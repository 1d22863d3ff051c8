"""Which tiles the attention kernels visit, and which of them without a mask: no more and no fewer than those that their rows see."""

import inspect
import itertools
import operator
from collections import defaultdict

import pytest
import torch

from ckpt_ext import reference
from ckpt_ext.kernels import attention_backward as backward
from ckpt_ext.kernels import attention_forward as forward
from ckpt_ext.kernels.segments import key_spans, query_spans
from ckpt_ext.kernels.tiles import Tile
from ckpt_ext.masks import Mask

LENGTHS = [(1, 1), (7, 7), (16, 16), (33, 33), (48, 48), (17, 40), (40, 17), (48, 31)]
TILES = [Tile(16, 16), Tile(16, 32), Tile(32, 16)]

# --- what is visited ---


def visits(monkeypatch, mask: Mask, shape: tuple[int, int, int, int], tile: Tile) -> dict[str, dict]:
    """By walk and (batch, head, first row of the tile): the first column of each tile of columns, and whether it is masked.

    The kernels run, but the walks in them note their bounds in place of any arithmetic.
    """
    batch, heads, query_count, key_count = shape
    found: dict[str, dict] = {}

    def note(module, name: str, carried: int) -> None:
        walk = found[name] = defaultdict(list)
        names = inspect.signature(getattr(module, name).fn)

        def noted(*args):
            given = names.bind(*args).arguments
            _, _, *place = given["mask"]
            over_keys = name != "_walk_queries"
            place.append(given["queries"].handle.data[0] if over_keys else given["first_key"])
            first, end = (given[bound] for bound in (("first_key", "end_key") if over_keys else ("first_query", "end_query")))
            step = given["BLOCK_N"] if over_keys else given["BLOCK_M"]
            starts = range(operator.index(first), operator.index(end), step)
            walk[tuple(map(operator.index, place))] += [(start, bool(given["MASKED"])) for start in starts]
            return args[:carried] if carried > 1 else args[0]

        monkeypatch.setattr(module, name, noted)

    for module in (forward, backward):  # nothing is computed, so nothing is read or written
        monkeypatch.setattr(module, "load_rows", lambda *_: None)
        monkeypatch.setattr(module, "store_rows", lambda *_: None)
    launch = backward.launch
    monkeypatch.setattr(backward, "launch", lambda kernel, *args, **kwargs: (
        None if kernel is backward._attention_delta else launch(kernel, *args, **kwargs)
    ))  # fmt: skip
    note(forward, "_attend", 3)
    note(backward, "_walk_keys", 1)
    note(backward, "_walk_queries", 2)
    q, k = torch.zeros(batch, heads, query_count, 16), torch.zeros(batch, heads, key_count, 16)
    lse = torch.zeros(shape[:3])
    forward.attention_forward(q, k, k, mask=mask, scale=1.0, tile=tile)
    backward.attention_backward(q, q, k, k, q, lse, mask=mask, scale=1.0, tile=tile)
    return found


def needs(seen: torch.Tensor, rows: int, cols: int, over_keys: bool) -> dict[tuple[int, int, int], list[tuple[int, bool]]]:
    """The same from `seen [B, H, Tq, Tk]`, written out, for tiles of `rows` that walk over tiles of `cols`."""
    key_count = seen.size(3)
    seen = seen if over_keys else seen.transpose(2, 3)
    found = {}
    for row in range(0, seen.size(2), rows):
        for batch, head in torch.cartesian_prod(*map(torch.arange, seen.shape[:2])).tolist():
            tiles = [(col, seen[batch, head, row : row + rows, col : col + cols]) for col in range(0, seen.size(3), cols)]
            ragged = [(col + cols if over_keys else row + rows) > key_count for col, _ in tiles]  # no query sees a key beyond the last
            found[batch, head, row] = [
                (col, not part.all().item() or over) for (col, part), over in zip(tiles, ragged, strict=True) if part.any()
            ]
    return found


def compare(monkeypatch, mask: Mask, shape: tuple[int, int, int, int], tile: Tile, *, exact: bool = True) -> int:
    """Hold what is visited against what is needed; not `exact`, more may be visited, and masked. Returns how many tiles were visited."""
    seen = reference.visible(mask._replace(dense=None), *shape[2:], torch.device("cpu")).expand(shape)
    with monkeypatch.context() as patch:
        found = visits(patch, mask, shape, tile)
    for name, walk in found.items():
        for place, needed in needs(seen, tile.block_m, tile.block_n, name != "_walk_queries").items():
            visited, where = walk[place], (name, mask, shape, tile, place)
            if mask.dense is not None:
                needed = [(start, True) for start, _ in needed]
            if exact:
                assert visited == needed, where
            starts = [start for start, _ in visited]
            assert starts == sorted(set(starts)) and {start for start, _ in needed} <= set(starts), where
            assert {start for start, masked in visited if not masked} <= {start for start, masked in needed if not masked}, where
    return sum(len(tiles) for walk in found.values() for tiles in walk.values())


@pytest.mark.parametrize("window", [None, 1, 5, 16, 20])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_positions(monkeypatch, causal, window):
    for (query_count, key_count), tile in zip(LENGTHS, itertools.cycle(TILES)):  # noqa: B905
        compare(monkeypatch, Mask(causal, window), (1, 1, query_count, key_count), tile)


def documents(*rows: list[int]) -> torch.Tensor:
    """int32 ids `[B, T]` of documents of these lengths, ascending from 0; of a negative length, padding of -1."""
    ids = [[-1 if length < 0 else document for document, length in enumerate(row) for _ in range(abs(length))] for row in rows]
    return torch.tensor(ids, dtype=torch.int32)


PACKINGS = {
    "even": documents([16, 16, 16]),
    "odd": documents([5, 30, 13]),
    "short": documents([3] * 16),
    "padding": documents([20, -28], [-20, 17, -11]),
    "nothing": documents([-48]),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_documents(monkeypatch, packing):
    tiles = itertools.cycle(TILES)
    for causal, window, length in itertools.product((False, True), (None, 5, 20), (48, 41)):
        ids = PACKINGS[packing][:, :length]
        compare(monkeypatch, Mask(causal, window, ids, ids), (len(ids), 1, length, length), next(tiles))


def test_documents_of_other_queries_than_keys(monkeypatch):
    queries, keys = documents([9, 15, 9]), documents([20, 2, 18, -8])
    for window in (None, 7):
        compare(monkeypatch, Mask(False, window, queries, keys), (1, 1, 33, 48), Tile(16, 16), exact=window is None)


def test_ids_in_any_order_hide_nothing_that_is_seen(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    for highest in (1, 2, 5):
        queries, keys = (torch.randint(-1, highest, (2, count), generator=generator, dtype=torch.int32) for count in (41, 48))
        for causal in (False, True):
            compare(monkeypatch, Mask(causal, None, queries, keys), (2, 1, 41, 48), Tile(16, 16), exact=False)


def test_a_dense_mask_is_read_in_every_tile_that_the_others_leave(monkeypatch):
    dense = torch.ones(1, 1, 48, 48, dtype=torch.bool).expand(1, 2, 48, 48)
    ids = documents([5, 30, 13])
    compare(monkeypatch, Mask(dense=dense), (1, 2, 48, 48), Tile(16, 16))
    compare(monkeypatch, Mask(True, 5, ids, ids, dense), (1, 2, 48, 48), Tile(16, 16))


def test_documents_spare_work(monkeypatch):
    """Four documents of a tile each: as many tiles as documents in each of the three walks."""
    ids = documents([16] * 4)
    assert compare(monkeypatch, Mask(True, None, ids, ids), (1, 1, 64, 64), Tile(16, 16)) == 3 * 4


# --- spans ---


@pytest.mark.parametrize("packing", PACKINGS)
def test_spans_do_not_depend_on_chunks_or_strides(packing):
    ids = PACKINGS[packing]
    spaced = ids.repeat_interleave(2, 1)[:, ::2]
    for causal, window in ((False, None), (True, 20)):
        for spans in (key_spans, query_spans):
            expected = spans(Mask(causal, window, ids, ids), 16)
            assert torch.equal(spans(Mask(causal, window, spaced, ids), 16, chunk=16), expected)


def test_spans():
    mask = Mask(False, None, documents([20, 28]), documents([8, 8, -2]))
    assert key_spans(mask, 16).tolist() == [[[0, 8, 1], [0, 16, 0], [8, 16, 1]]]
    assert query_spans(mask, 16).tolist() == [[[0, 48, 0], [0, 0, 1]]]
    assert key_spans(Mask(), 16) is None and query_spans(Mask(causal=True, window=3), 16) is None


def test_a_window_may_be_wider_than_any_sequence(monkeypatch):
    compare(monkeypatch, Mask(False, 2**62), (1, 1, 33, 33), Tile(16, 16))
