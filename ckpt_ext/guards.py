"""What the Functions' forward and backward run under: autocast off, and no derivative of a derivative."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class _RefuseTwice(torch.autograd.Function):
    """Hands a gradient on, as a function of what it was computed from; differentiating it raises."""

    @staticmethod
    def forward(ctx, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("gradients of ckpt_ext's functions must not be differentiated again: double backward is not implemented")


def differentiable_once(backward: Callable) -> Callable:
    """Decorates a Function's backward: it runs without grad, and a derivative of its result raises RuntimeError.

    torch's `once_differentiable` lets a gradient of a constant `grad_output` pass as a constant, so that a gradient penalty would be lost
    in silence; here it stays a function of every saved tensor that requires grad. `create_graph` raises at once for a Function whose input
    is not saved (`ctx.has_saved_input`), for nothing could stand for that.
    """

    @functools.wraps(backward)
    def guarded(ctx, *grads: Tensor):
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # create_graph=False
            return results
        if not getattr(ctx, "has_saved_input", True):
            raise RuntimeError("create_graph must be False behind blocks that are offloaded or in a segment: they have no double backward")
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        return tuple(None if result is None else _RefuseTwice.apply(result, *sources) for result in results)

    return guarded


@contextlib.contextmanager
def without_autocast(x: Tensor) -> Iterator[None]:
    """Autocast off: dtypes are decided once, in the call, so that the replay computes in those of the forward pass wherever it runs."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            yield
    else:
        yield


def own(y: Tensor) -> Tensor:
    """y as no view of another tensor, without a copy: autograd forbids callers to change a Function's result in place where it is one."""
    return y.detach()
