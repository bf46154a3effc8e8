"""What rides on the root of a masked model: training forwards are counted and draw all samples at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from softprune.masks.batchnorm import MaskedBatchNorm, is_masked, unmask_
from softprune.masks.sampling import Chain, MaskBank
from softprune.rng import Clock


class RootHooks:
    """Forward hooks of the model itself. Knows the clock and the bank alone, so that a deep copy of the model
    (an EMA, say) copies those two with it and nothing else."""

    def __init__(self, clock: Clock, modules: Iterable[MaskedBatchNorm]) -> None:
        self.clock = clock
        self.bank = MaskBank(modules)
        self._drawn_ahead = False

    def draw_ahead(self, chain: Chain) -> None:
        """Do now what the next training forward would begin with."""
        self.clock.begin_forward()
        self.bank.draw_ahead(chain)
        self._drawn_ahead = True

    def before(self, module: nn.Module, args: Any) -> None:
        """A training forward begins."""
        if not module.training:
            return
        if not self._drawn_ahead:
            self.clock.begin_forward()
            self.bank.begin_forward()
        self._drawn_ahead = False

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """It is over."""
        if module.training:
            self.bank.end_forward()


def hook_root_(model: nn.Module, clock: Clock, modules: Iterable[MaskedBatchNorm]) -> RootHooks:
    """Let `model` count its training forwards on `clock` and draw its sites' samples together, in place."""
    hooks = RootHooks(clock, modules)
    model.register_forward_pre_hook(hooks.before)
    model.register_forward_hook(hooks.after)
    return hooks


def unmask_model_(model: nn.Module) -> None:
    """Give the plain model back, in place: no masks, no hooks of ours."""
    for module in model.modules():
        if is_masked(module):
            unmask_(module)  # type: ignore[arg-type]
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [
                key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), RootHooks)
            ]
            for key in ours:
                del hooks[key]
