"""Adapters beside the projections of a block, against autograd over the reference with the same masks."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ckpt_ext import BlockSpec, Policy, functional, reference, rng, rope
from ckpt_ext.called import Called
from ckpt_ext.lora import Adapter, LoRA
from ckpt_ext.projections import Dense, InCall
from ckpt_ext.segments import Place, Segment
from ckpt_ext.sites import MOST_ADAPTERS, PROJECTIONS, adapter_site
from ckpt_ext.testing import assert_accurate, eager_block

SAVES = ("input", "attention", "all")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
SPEC = BlockSpec(dim=24, heads=4, kv_heads=2, hidden_dim=20, rope_theta=1e4)
DROPPING = dataclasses.replace(SPEC, attn_dropout=0.1, residual_dropout=0.2, mlp_dropout=0.1)
PLAIN = dataclasses.replace(SPEC, activation="gelu", norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True)


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def adapter(base, rank, p=0.0, *, bias=False, seed=0, scaling=0.7, dtype=F64):
    out, width = base.weight.shape
    a, b = draw(rank, width, seed=seed, dtype=dtype).div_(5), draw(out, rank, seed=seed + 1, dtype=dtype).div_(5)
    offset = draw(out, seed=seed + 2, dtype=dtype).div_(5).requires_grad_() if bias else None
    return Adapter(a.requires_grad_(), b.requires_grad_(), offset, scaling, p)


def adapted(spec, p=0.1, *, parts=PROJECTIONS, count=2, frozen=False, dtype=F64, adapter_dtype=None):
    """Weights whose `parts` have `count` adapters each: the first with dropout, the second without, of rank 1 and with a bias."""
    weights = eager_block(spec, dtype).weights()
    for number, name in enumerate(parts):
        base = getattr(weights, name)
        if base is not None:
            kinds = [{"rank": 3, "p": p}, {"rank": 1, "bias": True, "scaling": -1.3}][:count]
            adapters = tuple(
                adapter(base, seed=10 * number + 3 * index, dtype=adapter_dtype or dtype, **kind) for index, kind in enumerate(kinds)
            )
            weights = weights._replace(**{name: LoRA(base, adapters)})
    for t in weights.flatten()[1]:
        if t is not None:
            t.requires_grad_(not frozen or any(t is a for a in adapter_tensors(weights)))
    return weights


def adapter_tensors(weights):
    loras = [part for part in (getattr(weights, name) for name in PROJECTIONS) if isinstance(part, LoRA)]
    return [t for part in loras for one in part.adapters for t in one[:3] if t is not None]


def seeded(weights, state):
    """The weights with the masks of `state`, as a block in training runs them."""
    parts = {name: getattr(weights, name) for name in PROJECTIONS if getattr(weights, name) is not None}
    return weights._replace(**{name: part.in_call(InCall(PROJECTIONS.index(name), state)) for name, part in parts.items()})


def leaves_of(x, weights):
    return [t for t in (x, *weights.flatten()[1]) if t is not None and t.requires_grad]


def run(x, weights, spec, grad, *, training=True, **options):
    torch.manual_seed(7)
    y = functional.block(x, weights, spec, training=training, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves_of(x, weights), grad)]


def expected(x, weights, spec, grad, *, training=True):
    torch.manual_seed(7)
    state = rng.reserve(x.device) if training else None
    y = reference.block(x, seeded(weights, state), spec, rope.table(spec, x.size(1), x.dtype, x.device), state)
    return [y.detach(), *torch.autograd.grad(y, leaves_of(x, weights), grad)]


def inputs(dtype=F64, *, length=5, requires_grad=True):
    return draw(2, length, 24, seed=1, dtype=dtype).requires_grad_(requires_grad), draw(2, length, 24, seed=2, dtype=dtype)


def assert_same(actual, wanted):
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained base", "frozen base"])
@pytest.mark.parametrize(
    "backend, slices, spec",
    [("aten", 1, SPEC), ("aten", 3, SPEC), ("aten", 1, DROPPING), ("aten", 3, DROPPING), ("aten", 3, PLAIN), ("triton", 2, DROPPING)],
    ids=["llama", "llama-3", "dropout", "dropout-3", "gpt-3", "triton-dropout-2"],
)
def test_all_projections_equal_autograd_over_the_reference(backend, frozen, spec, slices):
    weights, (x, grad) = adapted(spec, frozen=frozen), inputs()
    assert_same(run(x, weights, spec, grad, backend=backend, policy=Policy(slices=slices)), expected(x, weights, spec, grad))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_one_projection_alone_and_an_input_without_gradient(name):
    weights, (x, grad) = adapted(SPEC, parts=(name,), frozen=True), inputs(requires_grad=False)
    wanted = expected(x, weights, SPEC, grad)
    assert len(wanted) == 1 + 5 and all(g.any() for g in wanted)
    assert_same(run(x, weights, SPEC, grad, policy=Policy(slices=2)), wanted)


def test_some_tensors_of_an_adapter_alone():
    weights, (x, grad) = adapted(SPEC), inputs()
    for kept in range(3):
        for t in weights.flatten()[1]:
            if t is not None:
                t.requires_grad_(False)
        for name in PROJECTIONS:
            getattr(weights, name).adapters[1][kept].requires_grad_()
        assert_same(run(x, weights, SPEC, grad), expected(x, weights, SPEC, grad))


@pytest.mark.parametrize(
    "backend, dtype, adapter_dtype", [("aten", F64, F64), ("aten", F32, F32), ("aten", BF16, F32), ("triton", F32, F32)], ids=str
)
def test_bits_do_not_depend_on_what_is_saved_and_repeat(backend, dtype, adapter_dtype):
    spec = dataclasses.replace(DROPPING, heads=2, kv_heads=1)
    weights, (x, grad) = adapted(spec, dtype=dtype, adapter_dtype=adapter_dtype), inputs(dtype)
    slices = 3 if backend == "aten" else 1
    first, *others = (run(x, weights, spec, grad, backend=backend, policy=Policy(save, slices)) for save in (*SAVES, "input"))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_in_a_segment_and_offloaded_the_bits_are_the_same():
    weights, (x, grad) = adapted(DROPPING, dtype=F32), inputs(F32)

    def through(places, **options):
        torch.manual_seed(7)
        y = x
        for place in places:
            y = functional.block(y, weights, DROPPING, training=True, place=place, policy=Policy(**options))
        return [y.detach(), *torch.autograd.grad(y, leaves_of(x, weights), grad)]

    segment = Segment()
    plain = through((None, None, None))
    for other in (through([Place(segment, position) for position in range(3)]), through((None, None, None), offload=True)):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("dtype, adapter_dtype", [(F32, F32), (BF16, BF16), (BF16, F32), (torch.float16, F32)], ids=str)
def test_low_precision_is_as_accurate_as_eager(dtype, adapter_dtype):
    weights, (x, grad) = adapted(SPEC, dtype=dtype, adapter_dtype=adapter_dtype), inputs(dtype)
    layout, tensors = weights.flatten()
    wide = layout.bind([None if t is None else t.detach().double().requires_grad_() for t in tensors])
    truth = expected(x.detach().double().requires_grad_(), wide, SPEC, grad.double())
    ours, rival = run(x, weights, SPEC, grad), expected(x, weights, SPEC, grad)
    for a, b, c, leaf in zip(ours, rival, truth, [x, *leaves_of(x, weights)], strict=True):
        assert a.dtype == leaf.dtype
        # The gradients of wide adapters are sums of what was rounded to the block's dtype.
        assert_accurate(a.to(dtype), b.to(dtype), c, terms=SPEC.hidden_dim)


def test_wide_adapters_over_a_narrow_base_compute_wide():
    """As PEFT has it: the sum is rounded once, and an update far below the base's last bit is not lost on the way to A and B."""
    base = Dense(torch.zeros(4, 6, dtype=BF16))
    one = Adapter(draw(2, 6, dtype=F32), draw(4, 2, seed=1, dtype=F32), None, 2.0)
    x, lora = draw(3, 6, seed=2, dtype=BF16), LoRA(base, (one,))
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            assert torch.equal(lora(x), ((x.float() @ one.a.T) @ one.b.T * 2).to(BF16))
    grad = draw(3, 4, seed=3, dtype=BF16)
    grads = lora.grad_tensors(grad, x, [False, False, True, True, False, False])
    assert [None if g is None else g.dtype for g in grads] == [None, None, F32, F32, None, None]
    torch.testing.assert_close(grads[2], (grad.float() @ one.b * 2).T @ x.float(), rtol=1e-6, atol=1e-6)


def test_under_autocast_adapters_compute_in_its_dtype():
    weights, (x, grad) = adapted(SPEC, frozen=True, dtype=F32), inputs(F32)
    seen = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                seen.append(args[-1].dtype)
            return function(*args, **(kwargs or {}))

    with Watching():
        with torch.autocast("cpu", dtype=BF16):
            y = functional.block(x, weights, SPEC, training=True)
        grads = torch.autograd.grad(y, leaves_of(x, weights), grad)
    assert set(seen) == {BF16}
    assert all(g.dtype == F32 for g in grads)


def test_a_mask_is_a_function_of_the_row_however_the_rows_are_sliced():
    weights, (x, grad) = adapted(SPEC, 0.5), inputs(length=9)
    one, *others = (run(x, weights, SPEC, grad, policy=Policy(slices=slices)) for slices in (1, 3, 18))
    for other in others:
        assert_same(other, one)


@pytest.mark.parametrize("dtype, adapter_dtype", [(F64, F64), (F32, F32), (BF16, F32), (F32, BF16)], ids=str)
def test_rows_by_stretches_give_what_they_give_at_once(monkeypatch, dtype, adapter_dtype):
    base, x, grad = Dense(draw(12, 10, dtype=dtype)), draw(300, 10, seed=1, dtype=dtype), draw(300, 12, seed=2, dtype=dtype)
    one, two = adapter(base, 3, 0.4, dtype=adapter_dtype), adapter(base, 2, bias=True, seed=5, dtype=adapter_dtype)
    lora = LoRA(base, (one, two)).in_call(InCall(1, rng.reserve("cpu"))).rows_from(7)
    needs = [False, False, *[True] * 5, True, False]
    needs[4] = False  # there is no such bias
    runs = []
    for stretch in (1 << 23, 1):  # elements: a stretch is 128 rows at the least
        monkeypatch.setattr("ckpt_ext.projections._STRETCH", stretch)
        differentiable = lora(x).detach()
        with torch.no_grad():
            grads = [g for g in lora.grad_tensors(grad, x, needs) if g is not None]
            onto = [None if not need else torch.ones_like(t, dtype=F64) for t, need in zip(lora.tensors, needs, strict=True)]
            sums = [g - 1 for g in lora.grad_tensors(grad, x, needs, onto) if g is not None]
            outputs = [differentiable, lora(x), lora.grad_input(grad), lora.grad_input(grad, torch.ones_like(x))]
        runs.append([*outputs, *grads, *sums])
    assert len(runs[0]) == 4 + 5 + 5
    bits = 0.02 if dtype == BF16 else 1e-4 if dtype == F32 else 1e-11
    for whole, parts in zip(*runs, strict=True):
        torch.testing.assert_close(parts, whole, rtol=bits, atol=bits)


def test_what_a_called_base_returns_is_not_written_to():
    kept = []

    class Keeping(torch.nn.Linear):
        def forward(self, x):
            kept.append(super().forward(x))
            return kept[-1]

    base, x = Keeping(6, 4, bias=False, dtype=F64), draw(5, 6)
    with torch.no_grad():
        lora = LoRA(Called.of(base), (adapter(base, 2),))
        assert not torch.allclose(lora(x), kept[0])
        torch.testing.assert_close(kept[0], torch.nn.functional.linear(x, base.weight))


def test_the_gradient_of_a_dropped_element_is_zero_and_no_other():
    base, state = Dense(torch.zeros(4, 6, dtype=F64)), rng.reserve("cpu")
    lora = LoRA(base, (adapter(base, 3, 0.5),)).in_call(InCall(2, state)).rows_from(5)
    dropped = rng.dropout(torch.ones(7, 6, dtype=F64), rng.Dropout(state, 0.5, adapter_site(2, 0), row_start=5)) == 0
    assert dropped.any() and not dropped.all()
    assert torch.equal(lora.grad_input(draw(7, 4, seed=4)) == 0, dropped)


def test_dropping_everything_leaves_the_base():
    base, x, grad = Dense(draw(4, 6)), draw(5, 6, seed=1), draw(5, 4, seed=2)
    lora = LoRA(base, (adapter(base, 3, 1.0),)).in_call(InCall(0, rng.reserve("cpu")))
    assert torch.equal(lora(x), base(x)) and torch.equal(lora.grad_input(grad), base.grad_input(grad))
    _, _, *grads, _, _ = lora.grad_tensors(grad, x, [False, False, True, True, False, False])
    assert not any(g.any() for g in grads)


def test_every_adapter_of_a_block_has_masks_of_its_own():
    sites = [adapter_site(projection, index) for projection in range(len(PROJECTIONS)) for index in range(MOST_ADAPTERS)]
    assert len(set(sites)) == len(sites) and min(sites) == 16 and max(sites) <= 255
    base, x = Dense(torch.zeros(4, 40, dtype=F64)), torch.ones(8, 40, dtype=F64)
    one, state = adapter(base, 3, 0.5), rng.reserve("cpu")
    outputs = [LoRA(base, (one,)).in_call(InCall(number, state))(x) for number in range(2)]
    outputs.append(LoRA(base, (one._replace(p=0.0, scaling=0.0), one)).in_call(InCall(0, state))(x))
    assert not any(torch.allclose(a, b) for a, b in zip(outputs, outputs[1:] + outputs[:1], strict=True))


def test_one_state_a_block_and_none_where_nothing_is_dropped():
    x, _ = inputs()

    def drawn(weights, spec, training):
        """How many numbers the block has taken from the generator, in states; and how many it saves, and in how many storages."""
        saved, before = [], torch.get_rng_state()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            functional.block(x, weights, spec, training=training)
        states = {t.untyped_storage().data_ptr() for t in saved if t.dtype == torch.int64}
        count, after = 0, torch.get_rng_state()
        torch.set_rng_state(before)
        while not torch.equal(torch.get_rng_state(), after) and count < 3:
            rng.reserve("cpu")
            count += 1
        return count, len(states)

    assert drawn(adapted(SPEC, 0.1), SPEC, True) == (1, 1)
    assert drawn(adapted(DROPPING, 0.1), DROPPING, True) == (1, 1)
    assert drawn(adapted(DROPPING, 0.0), DROPPING, True) == (1, 1)
    assert drawn(adapted(SPEC, 0.1), SPEC, False) == (0, 0)
    assert drawn(adapted(SPEC, 0.0), SPEC, True) == (0, 0)


def test_eval_drops_nothing_and_a_stale_state_is_not_used():
    weights, (x, grad) = adapted(SPEC, 0.5), inputs()
    assert_same(run(x, seeded(weights, rng.reserve("cpu")), SPEC, grad, training=False), expected(x, weights, SPEC, grad, training=False))


def test_two_blocks_and_two_steps_have_other_masks_and_a_seed_repeats_them():
    weights, (x, _) = adapted(SPEC, 0.5), inputs()
    torch.manual_seed(0)
    first, second = (functional.block(x, weights, SPEC, training=True) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(functional.block(x, weights, SPEC, training=True), first)
    assert not torch.allclose(first, second)


def test_a_frozen_base_costs_no_weight_gradient():
    x, grad = inputs()

    def flops(weights):
        y = functional.block(x, weights, SPEC, training=True)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(y, leaves_of(x, weights), grad)
        return counter.get_total_flops()

    rows, plain, rank = x.size(0) * x.size(1), adapted(SPEC, count=0), 3
    for t in plain.flatten()[1]:
        if t is not None:
            t.requires_grad_(False)
    bases = [getattr(plain, name).base for name in PROJECTIONS]
    trained, frozen, without = flops(adapted(SPEC, count=1)), flops(adapted(SPEC, count=1, frozen=True)), flops(plain)
    assert trained - frozen == sum(2 * rows * base.weight.numel() for base in bases)
    # Of an adapter, a pair of products with a and b: the base's row of them again but for down, u twice, u a, drop(x) a^T, dA and dB.
    widths = [(base.weight.size(1), base.weight.size(0)) for base in bases]
    again = sum(width + out for width, out in widths[:-1])
    backward = sum((width + out) + (out + width) + (width + out) for width, out in widths)
    assert frozen - without == 2 * rows * rank * (again + backward)


def test_gradcheck():
    weights, (x, _) = adapted(SPEC, 0.3, parts=("q", "down")), inputs(length=3)
    layout, tensors = weights.flatten()

    def block(x, *tensors):
        torch.manual_seed(3)
        return functional.block(x, layout.bind(tensors), SPEC, training=True)

    assert torch.autograd.gradcheck(block, (x, *tensors), fast_mode=True)


@pytest.mark.filterwarnings("default")
def test_one_compiled_graph_has_the_gradients_and_masks_of_eager():
    weights, (x, grad) = adapted(SPEC, 0.3, parts=("q", "down"), count=1, frozen=True), inputs()
    leaves = leaves_of(x, weights)

    def block(x):
        return functional.block(x, weights, SPEC, training=True)

    torch._dynamo.reset()
    runs = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        y = function(x)
        runs.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
    torch._dynamo.reset()
    assert_same(*runs)


def bad(a=(2, 24), b=(24, 2), bias=None, **options):
    return Adapter(draw(*a), draw(*b), None if bias is None else draw(*bias), **options)


@pytest.mark.parametrize(
    "adapters, message",
    [
        ((bad(p=1.5),), "an adapter's p must be a probability in .0, 1., got 1.5"),
        ((bad(scaling=float("nan")),), "an adapter's scaling must be a finite number, got nan"),
        ((bad(b=(24, 3)),), r"an adapter must be of a \[r, in\] and b \[out, r\], got \[2, 24\] and \[24, 3\]"),
        ((bad(a=(2,)),), "an adapter must be of a"),
        ((bad(bias=(3,)),), r"an adapter's b_bias must have shape \[24\], got \[3\]"),
        ((bad(),) * (MOST_ADAPTERS + 1), f"adapters must be at most {MOST_ADAPTERS} a projection, got {MOST_ADAPTERS + 1}"),
        ((bad()._replace(a=torch.ones(2, 24, dtype=torch.int8)),), "weight . must be float64, .*, got torch.int8"),
    ],
)
def test_bad_adapters_are_refused(adapters, message):
    weights = eager_block(SPEC).weights()
    with pytest.raises(ValueError, match=message):
        functional.block(inputs()[0], weights._replace(q=LoRA(weights.q, adapters)), SPEC)


def test_it_cannot_be_cut():
    base = Dense(draw(4, 6))
    kind = LoRA(base, (adapter(base, 2),)).kind
    assert not kind.cuttable
    for cut in (kind.rows, kind.columns):
        with pytest.raises(TypeError, match="cannot be cut"):
            cut((), slice(0, 2))
