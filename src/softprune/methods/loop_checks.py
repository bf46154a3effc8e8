"""Mistakes in a training loop that a pruner can notice while it trains: a loss left out or added twice, other steps."""

import gc
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from softprune.errors import ConfigError, first_few
from softprune.log import get_logger
from softprune.methods.optimizer_hooks import OptimizerHooks

logger = get_logger(__name__)

_WITHOUT_LOSS = {
    True: ("without pruner.loss(...)", "call loss = pruner.loss(task_loss) before loss.backward()"),
    False: (
        "with the model in eval mode",
        "call model.train() before the forward pass, and pruner.loss(...) before model.eval()",
    ),
}
"""What is wrong with a step to which the method added nothing, and the remedy, by whether the model trains."""
_MOST_CHANGES = 8
"""Times that weights may change from loss to loss without a step of the attached optimizer."""
_DEPTH = 4
"""Operations before a call of pruner.loss in which another call, or a scaler's factor, is found."""


class LoopChecks:
    """What the training loop of one pruner has called so far. A mistake is logged once, or raises a ConfigError."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._own = model, frozenset(map(id, model.parameters()))
        self.loss_called = self.loss_compiled = False
        self._marked = self._differentiated = False
        self._losses = self._foreign_steps = 0
        self._scale_checked = False
        self._said: set[str] = set()

    def warn_once(self, message: str, *values: object) -> None:
        """Log a mistake, the first time that it is made."""
        if message not in self._said:
            self._said.add(message)
            logger.warning("softprune: " + message, *values)

    def before_loss(self, hooks: OptimizerHooks | None) -> None:
        """Steps are counted on the optimizer: without one the noise never changes and targets are never reached."""
        if hooks is None:
            self._losses += 1
            if self._losses > 1:
                self.warn_once(
                    "no optimizer is attached, so no step is counted: call pruner.attach(optimizer) before the first "
                    "step"
                )
        elif hooks.stepped_by_another():
            self._foreign_steps += 1
            # Loading a checkpoint changes the weights once, and SAM and its variants do so a few times within a step;
            # another optimizer does so between any two losses.
            if self._foreign_steps > _MOST_CHANGES:
                raise ConfigError(
                    "a pruner counts the steps of the optimizer that it is attached to. Got weights that another one "
                    "changes; after replacing the optimizer call pruner.release() and pruner.attach(new_optimizer)."
                )

    def check_norms(self, norms: Mapping[str, nn.Module]) -> None:
        """Warn of masked BatchNorms in eval mode, which use hard masks, while the model trains."""
        still = [f"'{name}'" for name, norm in norms.items() if not norm.training]
        if still:
            self.warn_once(
                "the masks of BatchNorms are sampled in training mode only. Got %d of %d in eval mode while the model "
                "trains (%s): leave them in training mode, or set requires_grad=False on those that should stay as "
                "they are before the pruner is made",
                len(still),
                len(norms),
                first_few(still),
            )

    def check_task(self, task: Tensor, last: list[Any]) -> None:
        """Warn of a task loss to which nothing should be added: of another network, scaled, or of several samples."""
        if task.numel() > 1:
            self.warn_once(
                "pruner.loss(...) takes one number. Got a loss of shape %s, to each of whose values what the method "
                "adds is added: call pruner.loss(loss.mean())",
                tuple(task.shape),
            )
        if self._is_of_another_network(task, last):
            self.warn_once(
                "pruner.loss(...) takes a loss of the network that is being pruned. Got one that depends on none of "
                "its parameters: train a compact network with the task loss alone, and with an optimizer of its own or "
                "after softprune.remap_optimizer"
            )
        # The first loss only: reading a factor waits for the device.
        factor = 1.0 if self._scale_checked else max(map(_scale, last), default=1.0)
        self._scale_checked = True
        if factor > 1:
            self.warn_once(
                "pruner.loss(...) takes the task loss before a GradScaler scales it. Got one multiplied by %g, against "
                "which what the method adds is too small: call scaler.scale(pruner.loss(loss))",
                factor,
            )

    def _is_of_another_network(self, task: Tensor, last: list[Any]) -> bool:
        others = set()
        for node in itertools.chain(last, _nodes(task)):  # most losses have a parameter among their last operations
            # A reentrant checkpoint hides its parameters, but not its inputs.
            if type(node).__name__ == "AccumulateGrad" and isinstance(node.variable, nn.Parameter):
                if id(node.variable) in self._own:
                    return False
                others.add(id(node.variable))
        if others:  # or load_state_dict(assign=True) has replaced parameters since
            self._own = frozenset(map(id, self._model.parameters()))
        return bool(others) and others.isdisjoint(self._own)

    def contains_loss(self, last: list[Any]) -> bool:
        """Return whether one of the last operations is that of a marked loss; those of micro-batches are not."""
        # What a compiled function returns cannot be marked in it: its node is named as that of any such function.
        if not any(
            node.metadata.get("softprune") == id(self)
            or (self.loss_compiled and node.name() == "CompiledFunctionBackward")
            for node in last
        ):
            return False
        self.warn_once(
            "pruner.loss(...) is called once for each task loss. Got what it returned before, to which nothing is "
            "added again: leave one of the calls out (the callbacks for Lightning and transformers contain one)"
        )
        return True

    def mark_loss(self, total: Tensor) -> None:
        """Mark a loss that contains the method's own, on its node of autograd, which lives as long as its graph."""
        if total.grad_fn is not None:
            total.grad_fn.metadata["softprune"] = id(self)  # type: ignore[index]
            total.register_hook(self._note_backward)
            self._marked = True

    def _note_backward(self, _: Tensor) -> None:
        self._differentiated = True

    def after_step(self, *, penalised: bool, training: bool) -> None:
        """Note that the attached optimizer has made a step. `penalised`: the method adds to the loss."""
        self._foreign_steps = 0
        if penalised and not self.loss_called and all(each.grad is None for each in self._model.parameters()):
            self.warn_once(
                "an optimizer step ran without a gradient of the network that is being pruned, and changed nothing: "
                "train a compact network with an optimizer of its own, or after softprune.remap_optimizer"
            )
        elif penalised and not self.loss_called:
            self.warn_once(
                "an optimizer step ran %s, so nothing was added to the task loss: %s", *_WITHOUT_LOSS[training]
            )
        if self._marked and not self._differentiated:
            self.warn_once(
                "pruner.loss(...) returns the loss to differentiate. Got an optimizer step without a backward pass of "
                "it, so that nothing is pruned: call loss = pruner.loss(loss), then loss.backward()"
            )
        self.loss_called = self.loss_compiled = self._marked = self._differentiated = False


def last_operations(loss: Tensor) -> list[Any]:
    """Return the operations of a loss, as nodes of autograd, in which the checks look for calls and factors."""
    return list(_nodes(loss, _DEPTH))


def _nodes(loss: Tensor, depth: int = sys.maxsize) -> Iterator[Any]:
    """Yield the operations of a loss, as nodes of autograd: the last one first, up to `depth` levels."""
    level: set[Any] = {loss.grad_fn}
    seen: set[Any] = {None}
    while depth and (level := level - seen):
        yield from level
        seen |= level
        level, depth = {input for node in level for input, _ in node.next_functions}, depth - 1


def _scale(node: Any) -> float:
    """Return the factor with which a GradScaler has multiplied in this operation; 1 for all others."""
    try:
        factor = getattr(node, "_saved_other", None) if node.name() == "MulBackward0" else None
    except RuntimeError:  # a loss that has gone backward, for a log
        return 1.0
    # A number that Python multiplies with is an integer or a double here.
    if factor is None or factor.ndim or factor.dtype != torch.float32 or factor.requires_grad:
        return 1.0
    value = float(factor)
    return value if value > 1 and value in _scales_in_use() else 1.0


def _scales_in_use() -> set[float]:
    """Return the factors of all GradScalers of this process, which takes about 0.1 s."""
    # isinstance() would read an attribute of every object, for which deprecated ones warn.
    scalers = [each for each in gc.get_objects() if issubclass(type(each), GradScaler)]
    return {scaler.get_scale() for scaler in scalers}
