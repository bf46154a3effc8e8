"""Masks on a whole model: count training forwards, draw all samples at once, remove the masks, refuse masked models."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from softprune.errors import ModelError
from softprune.masks.batchnorm import MaskedBatchNorm, is_masked, unmask_
from softprune.masks.sampling import Chain, MaskBank
from softprune.rng import Clock


class RootHooks:
    """Forward hooks of the model itself.

    They know the clock and the bank alone, so that a deep copy of the model (an EMA, say) copies nothing else.
    """

    def __init__(self, clock: Clock, modules: Iterable[MaskedBatchNorm]) -> None:
        self.clock = clock
        self.bank = MaskBank(modules)
        self._drawn_ahead = False

    def draw_ahead(self, chain: Chain) -> None:
        """Draw the samples of the next training forward now."""
        self.clock.begin_forward()
        self.bank.draw_ahead(chain)
        self._drawn_ahead = True

    def before(self, module: nn.Module, args: Any) -> None:
        """Begin a training forward."""
        if not module.training:
            return
        if not self._drawn_ahead:
            self.clock.begin_forward()
            self.bank.begin_forward()
        self._drawn_ahead = False

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a training forward."""
        if module.training:
            self.bank.end_forward()


def hook_root_(model: nn.Module, clock: Clock, modules: Iterable[MaskedBatchNorm]) -> RootHooks:
    """Let `model` count its training forwards on `clock` and draw the samples of its sites together, in place."""
    hooks = RootHooks(clock, modules)
    model.register_forward_pre_hook(hooks.before)
    model.register_forward_hook(hooks.after)
    return hooks


def unmask_model_(model: nn.Module) -> None:
    """Remove all masks and hooks of softprune from `model`, in place."""
    for module in model.modules():
        if is_masked(module):
            unmask_(module)  # type: ignore[arg-type]
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), RootHooks)]
            for key in ours:
                del hooks[key]


def check_unmasked(model: nn.Module, purpose: str, *, name: str = "model") -> None:
    """Raise a ModelError if `model`, which the caller calls `name`, has masks: `purpose` needs one without."""
    masked = [path for path, module in model.named_modules() if is_masked(module)]
    if masked:
        raise ModelError(
            f"{purpose} needs a network without masks. Got `{name}` with masks on {len(masked)} of its BatchNorms "
            f"('{masked[0]}' is the first), from a pruner that still works on it. Call pruner.detach() first, or "
            "pass what pruner.compact() returned."
        )
