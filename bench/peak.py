"""Peak memory of a stack of Llama-8B-shaped blocks, in block inputs, on fake tensors: no GPU and no memory needed.

    python -m bench.peak --layers 4 --length 32768 --frozen

A block input is `length * 4096 * 2` bytes (bfloat16). Every storage counts from birth to death but for parameters and, once accumulated,
their gradients; x counts as one. "saved" is what is alive between forward and backward. The loss is the sum of the last block's output.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock
from ckpt_ext.memory import LiveStorages

SPEC = BlockSpec(dim=4096, heads=32, kv_heads=8, hidden_dim=14336, rope_theta=5e5)


def measure(run: Callable[[nn.Module, Tensor], Tensor], blocks: nn.ModuleList, length: int) -> tuple[float, float]:
    """Peak and saved memory of a step through `blocks`, in block inputs of `length` tokens. Call it under a fake-tensor mode."""
    x = torch.empty(1, length, SPEC.dim, dtype=torch.bfloat16, requires_grad=True)
    memory = LiveStorages([x, *blocks.parameters()])
    for parameter in blocks.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.ignore(p.grad))
    with memory:
        y = x
        for block in blocks:
            y = run(block, y)
        loss = y.sum()
        del y
        saved = memory.live
        loss.backward()
    unit = x.nbytes
    return memory.peak / unit + 1, saved / unit + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=32768, help="tokens")
    parser.add_argument("--frozen", action="store_true", help="parameters need no gradient, as in adapter training")
    parser.add_argument("--slices", type=int, default="auto", help="of our blocks; auto chooses by shape")
    args = parser.parse_args()

    def ours(save: str) -> Callable[[], nn.Module]:
        return lambda: TransformerBlock(SPEC, policy=Policy(save, args.slices), dtype=torch.bfloat16)

    def plain(block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    runs: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
        "plain": (lambda: EagerBlock(SPEC, dtype=torch.bfloat16), plain),
        "torch checkpoint": (lambda: EagerBlock(SPEC, dtype=torch.bfloat16), lambda block, x: checkpoint(block, x, use_reentrant=False)),
        "ours: attention": (ours("attention"), plain),
        "ours: input": (ours("input"), plain),
    }
    print(f"{args.layers} layers, {args.length} tokens, {'frozen' if args.frozen else 'trained'}, in block inputs")
    print(f"{'run':<18} {'saved':>8} {'peak':>8}")
    for name, (make, run) in runs.items():
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch checkpoint asks fake devices for random states
            blocks = nn.ModuleList(make() for _ in range(args.layers)).requires_grad_(not args.frozen)
            peak, saved = measure(run, blocks, args.length)
        print(f"{name:<18} {saved:>8.2f} {peak:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
