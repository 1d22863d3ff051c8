"""Attention of the ATen backend: all of `Scoring`, by the fused kernel and by plain products, against the specification in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_ext import functional, reference, rng
from ckpt_ext.backends import aten, aten_attention, aten_chunks, aten_fused
from ckpt_ext.masks import Mask, attention_mask, full_mask
from ckpt_ext.memory import LiveStorages
from ckpt_ext.scoring import Scoring
from ckpt_ext.testing import assert_accurate, framed

F64 = torch.float64
CPU = torch.device("cpu")
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
paths = pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_bool(*shape, share=0.6, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def ids(length, seed=0):
    return torch.randint(-1, 2, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def qkv(queries=21, keys=21, dtype=F64):
    shapes = (HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)
    return [randn(BATCH, length, heads, DIM, seed=seed, dtype=dtype).transpose(1, 2) for seed, (heads, length) in enumerate(shapes)]


def masked(queries=21, keys=21, *, causal=False, window=None, **data):
    return full_mask(attention_mask(**data), causal=causal, window=window, shape=(BATCH, HEADS, queries, keys), device=CPU)


def sinks(dtype=F64):
    return randn(HEADS, seed=8, dtype=dtype)


def drop(p=0.3, **options):
    return rng.Dropout(torch.tensor([7, 0]), p, rng.Site.ATTENTION, **options)


def run(q, k, v, scoring, grad=None):
    """`(out, dq, dk, dv, dsinks)` of the backend."""
    out, lse = aten.attention(q, k, v, scoring)
    grad = randn(*out.shape, seed=9, dtype=out.dtype) if grad is None else grad
    return out, *aten.attention_backward(grad, q, k, v, out, lse, scoring)


def specified(q, k, v, scoring, grad=None):
    """The same by the specification, in the dtype of its inputs."""
    tensors = [t.detach().requires_grad_() for t in (q, k, v, *([] if scoring.sinks is None else [scoring.sinks]))]
    given_sinks = None if scoring.sinks is None else tensors[3]
    out = reference.attention(
        *tensors[:3], mask=scoring.mask, scale=scoring.scale, softcap=scoring.softcap, sinks=given_sinks, dropout=scoring.dropout
    )
    grad = randn(*out.shape, seed=9, dtype=out.dtype) if grad is None else grad
    grads = torch.autograd.grad(out, tensors, grad)
    return out.detach(), *grads, *([None] if scoring.sinks is None else [])


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


FEATURES = {
    "causal": lambda q, k: Scoring(masked(q, k, causal=True), 0.3),
    "window": lambda q, k: Scoring(masked(q, k, causal=True, window=4), 0.3),
    "window both ways": lambda q, k: Scoring(masked(q, k, window=3), 0.3),
    "documents": lambda q, k: Scoring(masked(q, k, segment_ids=(ids(q), ids(k, 1))), 0.3),
    "documents, causal": lambda q, k: Scoring(masked(q, k, causal=True, segment_ids=(ids(q), ids(k, 1))), 0.3),
    "padding": lambda q, k: Scoring(masked(q, k, key_mask=random_bool(BATCH, k)), 0.3),
    "padding on the left, causal": lambda q, k: Scoring(masked(q, k, causal=True, key_mask=torch.arange(k).expand(BATCH, k) >= 3), 0.3),
    "dense": lambda q, k: Scoring(masked(q, k, mask=random_bool(BATCH, HEADS, q, k)), 0.3),
    "dense, causal, one for all heads": lambda q, k: Scoring(masked(q, k, causal=True, mask=random_bool(1, 1, q, k)), 0.3),
    "dense, one for all keys": lambda q, k: Scoring(masked(q, k, mask=random_bool(BATCH, HEADS, q, 1)), 0.3),
    "softcap": lambda q, k: Scoring(masked(q, k, causal=True), 1.5, softcap=1.0),
    "sinks": lambda q, k: Scoring(masked(q, k, causal=True), 0.3, sinks=sinks()),
    "sinks and a window": lambda q, k: Scoring(masked(q, k, causal=True, window=3), 0.3, sinks=sinks()),
    "dropout": lambda q, k: Scoring(masked(q, k), 0.3, dropout=drop()),
    "dropout and a window": lambda q, k: Scoring(masked(q, k, causal=True, window=5), 0.3, dropout=drop(row_start=3)),
    "all": lambda q, k: Scoring(
        masked(q, k, causal=True, window=9, segment_ids=(ids(q), ids(k, 1)), mask=random_bool(1, HEADS, 1, k)),
        1.5, softcap=2.0, sinks=sinks(), dropout=drop(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("elements", [60, 1 << 20])
@pytest.mark.parametrize("queries, keys", [(21, 21), (5, 19), (19, 5)])
@pytest.mark.parametrize("feature", FEATURES)
def test_truth(monkeypatch, feature, queries, keys, elements):
    monkeypatch.setattr(aten_attention, "_CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(aten_chunks, "_LEAST_ROWS", 4)
    scoring, tensors = FEATURES[feature](queries, keys), qkv(queries, keys)
    expected = specified(*tensors, scoring)
    assert_same(run(*tensors, scoring), expected)
    if aten_fused.fits(tensors[0], scoring):
        monkeypatch.setattr(aten_fused, "fits", lambda *_: False)
        assert_same(run(*tensors, scoring), expected)


@pytest.mark.parametrize("feature", ["dropout and a window", "dense", "all"])
def test_some_of_the_heads_are_a_slice_of_all(monkeypatch, feature):
    monkeypatch.setattr(aten_attention, "_CHUNK_ELEMENTS", 300)
    scoring, (q, k, v) = FEATURES[feature](21, 21), qkv()
    grad = randn(*q.shape, seed=9)
    whole = run(q, k, v, scoring, grad)
    heads, kv_heads = slice(2, 4), slice(1, 2)
    part = run(q[:, heads], k[:, kv_heads], v[:, kv_heads], scoring.of_heads(heads, HEADS, 21), grad[:, heads])
    expected = [whole[0][:, heads], whole[1][:, heads], whole[2][:, kv_heads], whole[3][:, kv_heads]]
    assert_same(part, [*expected, None if whole[4] is None else whole[4][heads]])


@st.composite
def cases(draw):
    queries, keys, elements = draw(st.integers(1, 24)), draw(st.integers(1, 24)), draw(st.sampled_from([30, 500, 1 << 20]))
    seed = draw(st.integers(0, 99))
    data = {}
    if draw(st.booleans()):
        data["segment_ids"] = (ids(queries, seed), ids(keys, seed + 1))
    if draw(st.booleans()):
        data["key_mask"] = random_bool(BATCH, keys, seed=seed)
    if draw(st.booleans()):
        data["mask"] = random_bool(*(draw(st.sampled_from([1, size])) for size in (BATCH, HEADS, queries, keys)), seed=seed)
    mask = masked(queries, keys, causal=draw(st.booleans()), window=draw(st.sampled_from([None, 1, 2, 7, 40])), **data)
    scale, softcap, sunk, dropout = ([0.3, 0.3, -0.4, 0.0], [None, None, 1.0], [None, sinks()], [None, None, drop(), drop(1.0)])
    return queries, keys, elements, Scoring(mask, *(draw(st.sampled_from(choices)) for choices in (scale, softcap, sunk, dropout)))


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(cases())
def test_any_combination(case):
    queries, keys, elements, scoring = case
    tensors = qkv(queries, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aten_attention, "_CHUNK_ELEMENTS", elements)
        patch.setattr(aten_chunks, "_LEAST_ROWS", 3)
        assert_same(run(*tensors, scoring), specified(*tensors, scoring))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature", ["window", "padding", "documents, causal", "sinks", "sinks and a window", "softcap", "all"])
def test_low_precision_is_as_accurate_as_eager(monkeypatch, feature, dtype):
    monkeypatch.setattr(aten_attention, "_CHUNK_ELEMENTS", 300)
    low, scoring = qkv(dtype=dtype), FEATURES[feature](21, 21)
    exact = scoring
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks.to(dtype))
        exact = scoring._replace(sinks=scoring.sinks.double())
    grad = randn(BATCH, HEADS, 21, DIM, seed=9, dtype=dtype)
    truth, eager = specified(*(t.double() for t in low), exact, grad.double()), specified(*low, scoring, grad)
    for actual, a, b in zip(run(*low, scoring), eager, truth, strict=True):
        if actual is not None:
            assert_accurate(actual, a, b, terms=2 * 21)


# --- rows that see nothing ---


BLIND = {
    "a query of no document": (lambda: masked(segment_ids=torch.where(torch.arange(21) == 3, -1, 0).expand(BATCH, 21)), slice(3, 4)),
    "padding on the left, causal": (lambda: masked(causal=True, key_mask=(torch.arange(21) >= 4).expand(BATCH, 21)), slice(0, 4)),
    "no key at all": (lambda: masked(key_mask=torch.zeros(BATCH, 21, dtype=torch.bool)), slice(0, 21)),
    "a dense row": (lambda: masked(mask=(torch.arange(21) != 2)[None, None, :, None].expand(1, 1, 21, 21)), slice(2, 3)),
    "the window past the last key": (lambda: masked(21, 5, causal=True, window=3), slice(7, 21)),
}


@paths
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("elements", [60, 1 << 20])
@pytest.mark.parametrize("name", BLIND)
def test_a_row_that_sees_nothing_is_zero(monkeypatch, name, elements, sunk, fused):
    monkeypatch.setattr(aten_attention, "_CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(aten_chunks, "_LEAST_ROWS", 2)
    if not fused:
        monkeypatch.setattr(aten_fused, "fits", lambda *_: False)
    make, blind = BLIND[name]
    scoring = Scoring(make(), 0.3, sinks=sinks() if sunk else None)
    q, k, v = qkv(keys=5 if "window" in name else 21)
    out, lse = aten.attention(q, k, v, scoring)
    assert not out[:, :, blind].any()
    assert torch.equal(lse[:, :, blind], (sinks()[:, None] if sunk else torch.tensor(-torch.inf, dtype=F64)).expand_as(lse[:, :, blind]))
    _, grad_q, *grads = run(q, k, v, scoring)
    assert not grad_q[:, :, blind].any()
    assert all(t.isfinite().all() for t in (grad_q, *grads) if t is not None)


def test_a_sink_of_minus_infinity_is_none():
    mask = masked(causal=True, key_mask=(torch.arange(21) >= 4).expand(BATCH, 21))
    tensors = qkv()
    *actual, grad_sinks = run(*tensors, Scoring(mask, 0.3, sinks=torch.full((HEADS,), -torch.inf, dtype=F64)))
    assert_same(actual, run(*tensors, Scoring(mask, 0.3))[:4])
    assert not grad_sinks.any()


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_nothing_to_see(queries, keys, softcap):
    scoring = Scoring(Mask(True, 3), 0.3, softcap, sinks())
    for t in run(*qkv(queries, keys), scoring):
        assert not t.any()


# --- what lies in memory ---


@paths
def test_numbers_in_padding_never_matter(monkeypatch, fused):
    if not fused:
        monkeypatch.setattr(aten_fused, "fits", lambda *_: False)
    key_mask = random_bool(BATCH, 21)
    scoring = Scoring(masked(key_mask=key_mask), 0.3)
    q, k, v = qkv()
    expected = run(q, k, v, scoring)
    spoilt = [t.masked_fill(~key_mask[:, None, :, None], 1e30) for t in (k, v)]
    for a, b in zip(run(q, *spoilt, scoring)[:4], expected, strict=False):
        assert torch.equal(a, b)


VIEWS = {
    "framed by NaN": framed,
    "every other element": lambda t: torch.stack((t, t), -1)[..., 0],
    "heads before the length": lambda t: t.contiguous(),
    "positions repeated": lambda t: t[:, :, :1].expand_as(t),
    "elements repeated": lambda t: t[..., :1].expand_as(t),
    "batch repeated": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("feature", ["padding", "window", "sinks", "all"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_strides(feature, view):
    tensors, scoring = [view(t) for t in qkv()], FEATURES[feature](21, 21)
    grad = view(randn(BATCH, HEADS, 21, DIM, seed=9))
    assert_same(run(*tensors, scoring, grad), specified(*(t.contiguous() for t in tensors), scoring, grad.contiguous()))


@paths
def test_masks_of_any_strides(monkeypatch, fused):
    if not fused:
        monkeypatch.setattr(aten_fused, "fits", lambda *_: False)
    dense = random_bool(21, 21, HEADS, BATCH).permute(3, 2, 0, 1)
    segments = tuple(torch.stack((ids(21, seed), ids(21, 5)), -1)[..., 0] for seed in (0, 1))
    scoring = Scoring(masked(mask=dense, segment_ids=segments), 0.3)
    assert_same(run(*qkv(), scoring), specified(*qkv(), scoring))


@pytest.mark.parametrize("feature", FEATURES)
def test_results_lie_by_length_and_are_the_same_run_after_run(monkeypatch, feature):
    monkeypatch.setattr(aten_attention, "_CHUNK_ELEMENTS", 300)
    scoring = FEATURES[feature](21, 21)
    first = run(*qkv(), scoring)
    assert all(t.transpose(1, 2).is_contiguous() for t in first[:4])
    for a, b in zip(run(*qkv(), scoring), first, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("elements", [300, 1 << 20])
@pytest.mark.parametrize("feature", FEATURES)
def test_fake_tensors_take_the_same_shapes_and_memory(monkeypatch, feature, elements):
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr(aten_attention, "_CHUNK_ELEMENTS", elements)
    tensors, scoring = qkv(), FEATURES[feature](21, 21)
    grad = randn(BATCH, HEADS, 21, DIM, seed=9)
    with LiveStorages() as real:
        expected = run(*tensors, scoring, grad)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (*tensors, grad)]
        mask = Mask(*(mode.from_tensor(part) if isinstance(part, torch.Tensor) else part for part in scoring.mask))
        scoring = scoring._replace(mask=mask, sinks=None if scoring.sinks is None else mode.from_tensor(scoring.sinks))
        if scoring.dropout is not None:
            scoring = scoring._replace(dropout=replace(scoring.dropout, state=mode.from_tensor(scoring.dropout.state)))
        with LiveStorages() as faked:
            actual = run(*fake[:3], scoring, fake[3])
    assert faked.peak == real.peak
    for a, b in zip(actual, expected, strict=True):
        assert a is b is None or (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@paths
@pytest.mark.parametrize("mask", [{"segment_ids": True}, {"window": 9}, {"causal": True, "window": 9}])
def test_no_whole_mask_is_ever_alive(monkeypatch, mask, fused):
    monkeypatch.setattr(aten_attention, "_CHUNK_ELEMENTS", 1 << 12)
    if not fused:
        monkeypatch.setattr(aten_fused, "fits", lambda *_: False)
    length = 512
    q, k, v, grad = (torch.randn(1, length, 1, 4).transpose(1, 2) for _ in range(4))
    data = attention_mask(segment_ids=torch.arange(length)[None] // 100) if mask.pop("segment_ids", False) else None
    whole = full_mask(data, **{"causal": False, "window": None} | mask, shape=(1, 1, length, length), device=CPU)
    with LiveStorages() as counter:
        run(q, k, v, Scoring(whole, 0.5), grad)
    assert counter.peak < length * length


def test_a_window_costs_its_width():
    from torch.utils.flop_counter import FlopCounterMode

    length, window = 1024, 32
    q, k, v = (torch.randn(1, length, 1, 16).transpose(1, 2) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        run(q, k, v, Scoring(Mask(True, window), 0.25, softcap=9.0))
    products, most_rows = 2 + 5, aten_chunks._LEAST_ROWS
    assert counter.get_total_flops() <= products * 2 * 16 * length * (window + most_rows)


# --- the public edge ---


LENGTH = 12
PUBLIC = {
    "segment_ids": {"segment_ids": torch.tensor([[0] * 5 + [1] * 5 + [-1] * 2, [2] * 12])},
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 3, 3, 10])},
    "key_mask": {"key_mask": random_bool(BATCH, LENGTH)},
    "mask": {"mask": random_bool(1, HEADS, LENGTH, LENGTH), "causal": False},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": sinks()},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_functional(name):
    given = dict(PUBLIC[name])
    batch = 1 if name == "cu_seqlens" else BATCH
    tensors = [t[:batch].detach().requires_grad_() for t in qkv(LENGTH, LENGTH)]
    if "sinks" in given:
        given["sinks"] = given["sinks"].requires_grad_()
        tensors.append(given["sinks"])
    out = functional.attention(*tensors[:3], backend="aten", **given)
    data = attention_mask(**{n: given[n] for n in ("segment_ids", "cu_seqlens", "key_mask", "mask") if n in given}, length=LENGTH)
    shape = (batch, HEADS, LENGTH, LENGTH)
    mask = full_mask(data, causal=given.get("causal", True), window=given.get("window"), shape=shape, device=CPU)
    expected = reference.attention(*tensors[:3], mask=mask, softcap=given.get("softcap"), sinks=given.get("sinks"))
    grad = randn(*out.shape, seed=9)
    assert_same([out, *torch.autograd.grad(out, tensors, grad)], [expected, *torch.autograd.grad(expected, tensors, grad)])
