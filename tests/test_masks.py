"""What attention masks are made of, and what is refused."""

import pytest
import torch

from ckpt_ext.masks import AttentionMask, Mask, attention_mask, full_mask
from ckpt_ext.reference import visible

CPU = torch.device("cpu")


def seen(data, *, batch=2, heads=3, queries=4, keys=5, **options):
    """The whole mask written out, `[B, H, Tq, Tk]`."""
    shape = (batch, heads, queries, keys)
    mask = full_mask(data, **{"causal": False, "window": None} | options, shape=shape, device=CPU)
    return visible(mask, queries, keys, CPU).expand(shape)


def random_bool(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def test_nothing_given_is_no_mask():
    assert attention_mask() is None
    assert full_mask(None, causal=True, window=3, shape=(1, 1, 2, 2), device=CPU) == Mask(True, 3)


def test_segments_see_themselves_and_padding_sees_nothing():
    ids = torch.tensor([[0, 0, 7, 7, -1], [3, 3, 3, -1, -2]])
    expected = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    mask = attention_mask(segment_ids=ids)
    assert mask.query_segments.dtype == mask.key_segments.dtype == torch.int32
    assert torch.equal(seen(mask, queries=5), expected[:, None].expand(2, 3, 5, 5))


def test_segments_of_queries_and_keys_apart():
    queries, keys = torch.tensor([[1, 2, -1, 0]]), torch.tensor([[0, 2, 2, 1, -1]])
    expected = (queries[:, :, None] == keys[:, None]) & (keys >= 0)[:, None]
    assert torch.equal(seen(attention_mask(segment_ids=(queries, keys)), batch=1)[0, 0], expected[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8])
def test_bounds_of_documents(dtype):
    mask = attention_mask(cu_seqlens=torch.tensor([1, 3, 3, 200], dtype=dtype), length=300)
    expected = torch.tensor([-1] + [0] * 2 + [2] * 197 + [-1] * 100, dtype=torch.int32)
    assert torch.equal(mask.query_segments, expected[None])
    assert torch.equal(mask.key_segments, expected[None])


def test_one_bound_holds_no_document():
    assert (attention_mask(cu_seqlens=torch.tensor([0]), length=4).key_segments == -1).all()


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("as_mask", [False, True])
def test_padding_of_keys(segments, as_mask):
    key_mask = random_bool(2, 5)
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, -1, 2]])
    given = {"segment_ids": ids} if segments else {}
    given |= {"mask": key_mask[:, None, None]} if as_mask else {"key_mask": key_mask}
    mask = attention_mask(**given)
    expected = key_mask[:, None].expand(2, 5, 5)
    if segments:
        expected = expected & (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    assert mask.dense is None
    assert torch.equal(seen(mask, queries=5), expected[:, None].expand(2, 3, 5, 5))


def test_a_mask_of_keys_narrows_a_key_mask():
    one, other = random_bool(2, 5), random_bool(1, 5, seed=1)
    mask = attention_mask(key_mask=one, mask=other[:, None, None])
    assert torch.equal(seen(mask)[:, 0, 0], one & other)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 4, 5), (2, 1, 4, 1), (1, 3, 1, 5)])
def test_dense_masks_broadcast_without_a_copy(shape):
    dense = random_bool(*shape)
    mask = attention_mask(mask=dense)
    assert torch.equal(seen(mask), dense.expand(2, 3, 4, 5))
    assert mask.dense.data_ptr() == dense.data_ptr()


def test_all_conditions_hold_at_once():
    key_mask, dense = random_bool(2, 5), random_bool(1, 3, 4, 5, seed=2)
    query, key = torch.arange(4)[:, None], torch.arange(5)
    expected = key_mask[:, None, None] & dense & (key <= query) & (query - key < 3)
    assert torch.equal(seen(attention_mask(key_mask=key_mask, mask=dense), causal=True, window=3), expected)


def test_a_window_without_causality_looks_both_ways():
    query, key = torch.arange(4)[:, None], torch.arange(5)
    assert torch.equal(seen(None, window=2)[0, 0], (query - key).abs() < 2)


def test_of_heads():
    dense = random_bool(2, 3, 4, 5)
    mask = Mask(True, dense=dense)
    assert torch.equal(mask.of_heads(slice(1, 3)).dense, dense[:, 1:3])
    assert Mask(True).of_heads(slice(1, 3)) == Mask(True)


def test_nothing_is_read_on_the_host():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        mask = attention_mask(cu_seqlens=torch.zeros(3, dtype=torch.int64), length=5, key_mask=torch.ones(1, 5, dtype=torch.bool))
        full_mask(mask, causal=True, window=None, shape=(1, 2, 5, 5), device=CPU)


IDS = torch.zeros(2, 5, dtype=torch.int64)
IDS32 = IDS.int()
BOOLS = torch.ones(2, 5, dtype=torch.bool)


@pytest.mark.parametrize("given, error, message", [
    ({"mask": torch.zeros(1, 1, 4, 5)}, NotImplementedError, "mask must be bool"),
    ({"mask": torch.ones(4, 5, dtype=torch.bool)}, ValueError, r"mask must have shape \[B, H, Tq, Tk\].*got \[4, 5\]"),
    ({"key_mask": IDS}, ValueError, r"key_mask must be bool.*int64 \[2, 5\]"),
    ({"key_mask": BOOLS[0]}, ValueError, r"key_mask must be bool.*got torch.bool \[5\]"),
    ({"key_mask": BOOLS, "mask": BOOLS[:, None, None, :4]}, ValueError, r"key_mask must fit mask \[2, 4\], got \[2, 5\]"),
    ({"key_mask": BOOLS, "segment_ids": IDS[:, :4]}, ValueError, r"key_mask must fit segment_ids of keys \[2, 4\], got \[2, 5\]"),
    ({"segment_ids": IDS.float()}, ValueError, "segment_ids of queries must be integers"),
    ({"segment_ids": BOOLS}, ValueError, "segment_ids of queries must be integers"),
    ({"segment_ids": (IDS, IDS[0])}, ValueError, r"segment_ids of keys must be integers.*\[5\]"),
    ({"cu_seqlens": IDS[0]}, ValueError, "cu_seqlens must come with length"),
    ({"cu_seqlens": IDS[0], "length": 5, "segment_ids": IDS}, ValueError, "without segment_ids"),
    ({"cu_seqlens": IDS, "length": 5}, ValueError, r"cu_seqlens must be integers \[documents \+ 1\]"),
    ({"cu_seqlens": IDS[0, :0], "length": 5}, ValueError, r"cu_seqlens must be integers \[documents \+ 1\]"),
    ({"cu_seqlens": IDS[0].float(), "length": 5}, ValueError, r"cu_seqlens must be integers \[documents \+ 1\]"),
    ({"cu_seqlens": BOOLS[0], "length": 5}, ValueError, r"cu_seqlens must be integers \[documents \+ 1\]"),
])  # fmt: skip
def test_what_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        attention_mask(**given)


@pytest.mark.parametrize("data, message", [
    (IDS, "mask must be a AttentionMask"),
    (AttentionMask(dense=torch.ones(1, 1, 4, 5)), "mask's dense must be torch.bool, as attention_mask makes it, got torch.float32"),
    (AttentionMask(query_segments=IDS32[:, :4]), "query_segments and key_segments must be given together"),
    (AttentionMask(key_segments=IDS32), "query_segments and key_segments must be given together"),
    (AttentionMask(IDS32, IDS32), r"mask's query_segments must have or broadcast to shape \[2, 4\], got \[2, 5\]"),
    (AttentionMask(IDS32[:, :4], IDS32[:, :4]), r"mask's key_segments must have or broadcast to shape \[2, 5\], got \[2, 4\]"),
    (AttentionMask(dense=BOOLS[:, None, None, :3]), r"mask's dense must have or broadcast to shape \[2, 3, 4, 5\]"),
    (AttentionMask(IDS32[:, :4].to("meta"), IDS32.to("meta")), "mask's query_segments must be on the device of the queries cpu, got meta"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(data, message):
    with pytest.raises(ValueError, match=message):
        seen(data)


def test_ids_of_64_bits_keep_apart_what_differs():
    """Such as hashes of documents, whose lower halves may be equal."""
    ids = torch.tensor([[2**40 + 1, 2**40 + 1, 1, -(2**33), 2**33 + 1], [5, 5, 4, 4, 5]])
    mask = attention_mask(segment_ids=ids)
    assert mask.query_segments.dtype == torch.int32
    assert mask.query_segments.tolist() == [[3, 3, 1, -1, 2], [1, 1, 0, 0, 1]]
    pair = attention_mask(segment_ids=(ids[:, :2], ids))
    same = (pair.query_segments[:, :, None] == pair.key_segments[:, None]) & (pair.key_segments >= 0)[:, None]
    assert torch.equal(same, (ids[:, :2, None] == ids[:, None]) & (ids >= 0)[:, None])
    with torch._subclasses.FakeTensorMode() as mode:
        assert attention_mask(segment_ids=mode.from_tensor(ids)).key_segments.shape == ids.shape
