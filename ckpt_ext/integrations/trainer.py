"""An entry for `transformers.Trainer` and what is built on it, such as TRL's SFTTrainer."""

from __future__ import annotations

from typing import Any, Literal

from transformers import TrainerCallback

from ..plan import Plan
from ..spec import BackendName, Policy
from .chain import Segments
from .report import SwapReport
from .swapping import swap


class SwapCallback(TrainerCallback):
    """Swaps the trainer's model for recompute blocks, before it is wrapped or sharded.

        Trainer(model, arguments, callbacks=[ckpt_ext.SwapCallback(policy)], ...)

    `report` says which layers are swapped. `gradient_checkpointing=True` among the arguments does no harm: swapped layers do not read that
    switch. Raises what `ckpt_ext.swap` does, and ValueError where accelerate's FSDP plugin is told to checkpoint layers, too.
    """

    def __init__(
        self, policy: Policy | Plan | None = None, *, segments: Segments = None, backend: BackendName = "auto",
        fallback: Literal["checkpoint", "none"] = "checkpoint",
    ) -> None:  # fmt: skip
        self.policy, self.segments, self.backend, self.fallback = policy, segments, backend, fallback
        self.report: SwapReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._swap(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.report is None:  # added after the trainer was made
            self._swap(model)

    def _swap(self, model: Any) -> None:
        if model is not None:
            _refuse_a_second_checkpointing()
            self.report = swap(model, self.policy, segments=self.segments, backend=self.backend, fallback=self.fallback)


def _refuse_a_second_checkpointing() -> None:
    """accelerate puts `checkpoint_wrapper(layer, preserve_rng_state=False)` around the layers, which no swap can see beforehand: a block
    with dropout would run again in backward with other masks."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    plugin = AcceleratorState._shared_state.get("fsdp_plugin")  # there since the trainer made its accelerator
    if getattr(plugin, "activation_checkpointing", False):
        raise ValueError(
            "activation_checkpointing of the FSDP configuration must be False around swapped layers, which recompute anyway, got True"
        )
