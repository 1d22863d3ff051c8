"""Peak memory of a stack of Llama-8B-shaped blocks, in block inputs, on fake tensors: no GPU and no memory needed.

    python -m bench.peak --layers 4 --length 32768 --frozen --runs "ours: input" "ours: offload"

A block input is `length * 4096 * 2` bytes (bfloat16). Every storage counts from birth to death but for parameters and, once accumulated,
their gradients, and for what is in the host's memory; x counts as one. "saved" is what is alive between forward and backward. The loss is
the sum of the last block's output.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, checkpoint_sequential
from ckpt_ext.memory import LiveStorages

SPEC = BlockSpec(dim=4096, heads=32, kv_heads=8, hidden_dim=14336, rope_theta=5e5)


Through = Callable[[nn.ModuleList, Tensor], Tensor]


def measure(through: Through, blocks: nn.ModuleList, length: int) -> tuple[float, float]:
    """Peak and saved memory of a step through `blocks`, in block inputs of `length` tokens. Call it under a fake-tensor mode."""
    x = torch.empty(1, length, SPEC.dim, dtype=torch.bfloat16, device=next(blocks.parameters()).device, requires_grad=True)
    memory = LiveStorages([x, *blocks.parameters()])
    for parameter in blocks.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.ignore(p.grad))
    with memory:
        loss = through(blocks, x).sum()
        saved = memory.live
        loss.backward()
    unit = x.nbytes
    return memory.peak / unit + 1, saved / unit + 1


def one_by_one(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def checkpointed(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def segmented(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint_sequential(blocks, x)


RUNS: dict[str, tuple[Policy | None, Through]] = {
    "plain": (None, one_by_one),
    "torch checkpoint": (None, checkpointed),
    "ours: attention": (Policy("attention"), one_by_one),
    "ours: input": (Policy("input"), one_by_one),
    "ours: segments": (Policy("input"), segmented),
    "ours: offload": (Policy("input", offload=True), one_by_one),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=32768, help="tokens")
    parser.add_argument("--frozen", action="store_true", help="parameters need no gradient, as in adapter training")
    parser.add_argument("--slices", default="auto", help="of our blocks; auto chooses by shape")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "meta"), help="cpu: fake tensors, the ATen backend; meta: the Triton backend, ours alone"
    )
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=f"of {', '.join(RUNS)}")
    args = parser.parse_args()
    slices = args.slices if args.slices == "auto" else int(args.slices)
    print(f"{args.layers} layers, {args.length} tokens, {'frozen' if args.frozen else 'trained'}, in block inputs")
    print(f"{'run':<18} {'saved':>8} {'peak':>8}")
    for name in args.runs:
        policy, through = RUNS[name]
        with FakeTensorMode() if args.device == "cpu" else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch checkpoint asks fake devices for random states
            if policy is None:
                made = (EagerBlock(SPEC, dtype=torch.bfloat16, device=args.device) for _ in range(args.layers))
            else:
                ours = dataclasses.replace(policy, slices=slices)
                made = (TransformerBlock(SPEC, policy=ours, dtype=torch.bfloat16, device=args.device) for _ in range(args.layers))
            peak, saved = measure(through, nn.ModuleList(made).requires_grad_(not args.frozen), args.length)
        print(f"{name:<18} {saved:>8.2f} {peak:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
