"""The masked BatchNorm: the paper's revised BN layer, applied to an existing module by replacing its class.

Parameters, buffers, hooks and references to the module are kept. The keys of the state_dict do not change, and
existing optimizers still work.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.devices import is_distributed
from softprune.errors import ModelError
from softprune.graph.modules import is_timm_batch_norm

_sync_forward = cast(Callable[[_BatchNorm, Tensor], Tensor], nn.SyncBatchNorm.forward)


class Folded(NamedTuple):
    """Scale and shift of a masked BatchNorm in a forward pass, with the mask folded in."""

    weight: Tensor
    """``n * gamma`` for a sampled mask; gamma or 0 for a hard mask."""
    bias: Tensor
    """``n * beta`` for a sampled mask; beta or 0 for a hard mask."""
    n: Tensor | None = None
    """The sampled mask, (channels,); None for a hard mask."""
    on: Tensor | None = None
    """``n > 1/2``: channels whose running statistics are updated."""


def fold(n: Tensor, gamma: Tensor, beta: Tensor) -> Folded:
    """Fold n into scale and shift: ``(gamma z + beta) n``, equation 9 (eq:modified_bn), without an extra operation."""
    return Folded((n * gamma).to(gamma.dtype), (n * beta).to(beta.dtype), n, n.detach() > 0.5)


class MaskedBatchNorm(_BatchNorm):
    """Base class of all masked BatchNorms. Created by :func:`mask_`, never constructed.

    Training multiplies the output by a sampled mask, evaluation by the hard mask. In evaluation, the outputs of
    channels that are off are exactly zero.
    """

    masks: Any
    """The :class:`softprune.masks.Masks` of the model, which provide scale and shift in each forward pass."""
    number: int
    """Index of this BatchNorm in ``masks``."""
    plain_class: type[_BatchNorm]
    """The original class, restored by :func:`unmask_`."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        folded: Folded = self.masks.fold(self)
        if self.training:
            return self._train(input, folded)
        no_statistics = self.running_mean is None and self.running_var is None
        return F.batch_norm(
            input, self.running_mean, self.running_var, folded.weight, folded.bias, no_statistics, 0.0, self.eps
        )

    def _train(self, x: Tensor, folded: Folded) -> Tensor:
        """Normalise by batch statistics, and update the running statistics of the channels that are on."""
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if not self.track_running_stats or mean is None or var is None or count is None:
            return F.batch_norm(x, None, None, folded.weight, folded.bias, True, 0.0, self.eps)
        count.add_(1)
        momentum = 1.0 / float(count) if self.momentum is None else self.momentum
        gates = self._statistics_gates(folded.on)
        # autograd saves the statistics for the backward pass and checks that they do not change, so update a copy.
        new_mean, new_var = (each if on is None else each.clone() for each, on in zip((mean, var), gates, strict=True))
        y = F.batch_norm(x, new_mean, new_var, folded.weight, folded.bias, True, momentum, self.eps)
        _gate(mean, gates[0], new_mean, mean)
        _gate(var, gates[1], new_var, var)
        return y

    def _statistics_gates(self, on: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return masks of the channels whose running mean and variance are updated; None for all channels.

        A cumulative average (momentum None) counts batches for all channels together, so all must be updated.
        """
        gated = "none" if self.momentum is None else self.masks.gate_statistics
        return (None if gated == "none" else on), (on if gated == "both" else None)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MaskedBatchNorm":
        super()._apply(fn, recurse)
        self.masks.to(self.weight.device)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Masked classes are created at run time, so pickle and deepcopy reconstruct them from the plain class.
        return _empty_masked, (self.plain_class,), self.__dict__


class _MaskedSync(MaskedBatchNorm):
    """With several processes, runs PyTorch's SyncBatchNorm and multiplies its output by the sampled mask."""

    process_group: Any

    def _train(self, x: Tensor, folded: Folded) -> Tensor:
        if not is_distributed() or torch.distributed.get_world_size(self.process_group) == 1:
            return super()._train(x, folded)
        if folded.n is None and folded.weight is not self.weight:
            raise ModelError(
                "methods with a scale of their own cannot train SyncBatchNorms across processes. Got one; use plain "
                "BatchNorms."
            )
        statistics = [each for each in (self.running_mean, self.running_var) if each is not None]
        before = [each.clone() for each in statistics]
        y = _sync_forward(self, x)
        if folded.n is None:
            return y
        for running, on, old in zip(statistics, self._statistics_gates(folded.on), before, strict=False):
            _gate(running, on, running, old)
        return y * folded.n.to(y.dtype).view(1, -1, *(1,) * (y.dim() - 2))


class _MaskedAct(MaskedBatchNorm):
    """Masked BatchNorm of timm, which applies a dropout (often the identity) and an activation afterwards."""

    act: nn.Module
    drop: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


def uncounted() -> AbstractContextManager[Any]:
    """Hide tensors saved by sampling masks from activation checkpoints, which count the tensors saved for backward."""
    is_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
    if torch.compiler.is_compiling() or not is_enabled():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def mask_(bn: _BatchNorm, masks: Any, number: int) -> MaskedBatchNorm:
    """Convert a BatchNorm to a masked one, in place, and return it."""
    bn.__class__ = _masked_class(type(bn))
    masked = cast(MaskedBatchNorm, bn)
    masked.masks, masked.number = masks, number
    return masked


def unmask_(bn: _BatchNorm) -> _BatchNorm:
    """Convert a masked BatchNorm back to its plain class, in place; leave a plain one unchanged."""
    if isinstance(bn, MaskedBatchNorm):
        plain = bn.plain_class
        del bn.masks, bn.number
        cast(Any, bn).__class__ = plain
    return bn


def is_masked(module: nn.Module) -> bool:
    """Return whether the module is a masked BatchNorm."""
    return isinstance(module, MaskedBatchNorm)


# One masked class per plain class, so that types can be compared.
_masked_classes: dict[type[_BatchNorm], type[MaskedBatchNorm]] = {}


def _masked_class(plain: type[_BatchNorm]) -> type[MaskedBatchNorm]:
    if plain not in _masked_classes:
        bases: list[type] = [_MaskedSync if issubclass(plain, nn.SyncBatchNorm) else MaskedBatchNorm, plain]
        if is_timm_batch_norm(plain):
            bases.insert(0, _MaskedAct)
        namespace = {"plain_class": plain, "__module__": __name__, "__doc__": MaskedBatchNorm.__doc__}
        _masked_classes[plain] = type(f"Masked{plain.__name__}", tuple(bases), namespace)
    return _masked_classes[plain]


def _empty_masked(plain: type[_BatchNorm]) -> MaskedBatchNorm:
    cls = _masked_class(plain)
    return cls.__new__(cls)


@torch.no_grad()
def _gate(running: Tensor, on: Tensor | None, new: Tensor, old: Tensor) -> None:
    """Set ``running`` to ``new`` for channels that are on and to ``old`` for others; if ``on`` is None, do nothing."""
    if on is not None:
        torch.where(on, new, old, out=running)
