"""A byte-level language model over any kind of block, and runs that train it, several side by side in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from . import rng
from .memory import Ledger, LiveStorages, measure, saved_bytes
from .sequential import checkpoint_sequential
from .text import SYMBOLS

Segments = int | Sequence[int] | Literal["auto"]


def _attention_flops(products: int) -> Callable[..., int]:
    """The count of `products` products of all queries with all keys, causal or not, as PyTorch's counter has it for its other kernels."""

    def count(*shapes, out_shape=None, **_) -> int:
        batch, heads, queries, head_dim = shapes[0]
        keys = shapes[1 if products == 2 else 2][2]
        return 2 * products * batch * heads * queries * keys * head_dim

    return count


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops(2),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_flops(5),
}


class LanguageModel(nn.Module):
    """Symbols `[B, T]` to logits `[B, T, 256]`: embedding, blocks, RMSNorm, linear head.

    With `checkpointed`, each block is a region of `torch.utils.checkpoint`, non-reentrant. With `segments`, the blocks go through
    `checkpoint_sequential`.
    """

    def __init__(
        self, blocks: Iterable[nn.Module], dim: int, *, checkpointed: bool = False, segments: Segments | None = None,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.checkpointed, self.segments = checkpointed, segments
        self.embedding = nn.Embedding(SYMBOLS, dim, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(dim, eps=1e-5, dtype=dtype, device=device)
        self.head = nn.Linear(dim, SYMBOLS, bias=False, dtype=dtype, device=device)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.head(self.norm(self.through_blocks(self.embedding(symbols))))

    def through_blocks(self, x: Tensor) -> Tensor:
        """The stream `[B, T, dim]` after the last block."""
        if self.segments is not None:
            return checkpoint_sequential(self.blocks, x, segments=self.segments)  # type: ignore[arg-type]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of predicting each symbol of `windows [B, T + 1]` but the first from those before it."""
        logits = self(windows[:, :-1])
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide).flatten(0, 1), windows[:, 1:].flatten())


class Run:
    """One training of `model`. It draws from generators of its own, seeded by `seed`, so that runs may take turns in any order."""

    def __init__(self, model: LanguageModel, *, lr: float, warmup: int, seed: int) -> None:
        self.model = model
        self.device = model.head.weight.device
        self.lr, self.warmup = lr, warmup
        self.losses: list[float] = []
        self.seconds: list[float] = []
        """How long each step took: forward, backward and optimizer."""
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        with rng.capture([self.device]).replay():
            torch.manual_seed(seed)
            self._start = self._generators = rng.capture([self.device])

    def step(self, windows: Tensor) -> None:
        """One step on `windows [B, T + 1]`; appends to `losses` and `seconds`."""
        self.optimizer.param_groups[0]["lr"] = self.lr * min(1, (len(self.losses) + 1) / self.warmup)
        with self._generators.replay():
            self._wait()
            start = time.perf_counter()
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.model.loss(windows)
            loss.backward()
            self.optimizer.step()
            self._wait()
            self.seconds.append(time.perf_counter() - start)
            self._generators = rng.capture([self.device])
        self.losses.append(loss.item())

    def gradients(self, windows: Tensor) -> dict[str, Tensor]:
        """Each parameter's gradient on `windows`, at the present weights and with the masks of the first step."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._start.replay():
            self.model.loss(windows).backward()
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return gradients

    def weights(self) -> dict[str, Tensor]:
        """Each parameter as it is now."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def saved_bytes(self, windows: Tensor, shared: Iterable[Tensor]) -> int:
        """Bytes that the blocks keep between forward and backward, without parameters and what all blocks `shared`."""
        x = self.model.embedding(windows[:, :-1])
        with self._start.replay():
            return saved_bytes(lambda: self.model.through_blocks(x), [*self.model.parameters(), *shared])

    def peak_bytes(self, windows: Tensor, shared: Iterable[Tensor]) -> int:
        """The most bytes alive during a forward and backward pass of the model, without parameters and their finished gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        memory = LiveStorages([*self.model.parameters(), *shared, windows])
        hooks = [p.register_post_accumulate_grad_hook(lambda p: memory.ignore(p.grad)) for p in self.model.parameters()]
        with self._start.replay(), memory:
            self.model.loss(windows).backward()
        for hook in hooks:
            hook.remove()
        self.optimizer.zero_grad(set_to_none=True)
        return memory.peak

    def ledger(self, windows: Tensor) -> Ledger:
        """What the peak of a forward and backward pass of the model is made of."""
        symbols, dim = self.model.head.weight.shape
        self.optimizer.zero_grad(set_to_none=True)

        def step() -> None:
            with self._start.replay():
                self.model.loss(windows).backward()

        # Widths that are equal tell nothing apart.
        found = measure(step, self.model, vocab=None if symbols == dim else symbols, warmup=0)
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def flops(self, windows: Tensor) -> int:
        """Floating-point operations of the matrix products in a forward and backward pass, those of ATen's fused attention included.

        Kernels of other backends are not seen.
        """
        self.optimizer.zero_grad(set_to_none=True)
        counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        with self._start.replay(), counter:
            self.model.loss(windows).backward()
        self.optimizer.zero_grad(set_to_none=True)
        return counter.get_total_flops()

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
