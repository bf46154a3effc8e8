"""The masked BatchNorm: the paper's revised BN layer, put onto an existing module by swapping its class.

Parameters, buffers, hooks and every reference to the module stay as they are; the state_dict has the same
keys, and an optimizer made earlier still works.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.errors import ModelError
from softprune.graph.modules import is_timm_batch_norm
from softprune.mask_config import GateStatistics

_sync_forward = cast(Callable[[_BatchNorm, Tensor], Tensor], nn.SyncBatchNorm.forward)


class Folded(NamedTuple):
    """The affine of a masked BatchNorm in one forward pass."""

    weight: Tensor
    """``n * gamma`` with a sample, gamma or 0 with a hard mask."""
    bias: Tensor
    """``n * beta``, or beta or 0."""
    n: Tensor | None = None
    """The sample, one for each channel; None where none is drawn."""
    on: Tensor | None = None
    """``n > 1/2``: channels whose running statistics move."""

    @property
    def sampled(self) -> bool:
        return self.n is not None


def fold(n: Tensor, gamma: Tensor, beta: Tensor) -> Folded:
    """``(gamma z + beta) n``, equation 9 (eq:modified_bn), as an affine of z: no operation on activations is added."""
    return Folded((n * gamma).to(gamma.dtype), (n * beta).to(beta.dtype), n, n.detach() > 0.5)


class Decision(Protocol):
    """What decides about the channels of masked BatchNorms: :class:`softprune.masks.Masks`."""

    gate_statistics: GateStatistics
    shared: ClassVar[tuple[str, ...]]

    def fold(self, bn: "MaskedBatchNorm") -> Folded: ...

    def to(self, device: torch.device) -> None: ...


class MaskedBatchNorm(_BatchNorm):
    """What all masked BatchNorms have in common; made by :func:`mask_`, never constructed.

    Training normalises by batch statistics and scales by the sample of its mask; evaluation scales by the hard
    mask. Off channels come out exactly zero in evaluation.
    """

    masks: Decision
    """The masks of all sites of the model."""
    number: int
    """Its position among their BatchNorms."""
    folded: Folded | None
    """Its affine in the forward in progress, where it was computed for the whole model."""
    plain_class: type[_BatchNorm]
    """The class that :func:`unmask_` gives back."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        folded = self.masks.fold(self)
        if self.training:
            return self._train(input, folded)
        no_statistics = self.running_mean is None and self.running_var is None
        return F.batch_norm(
            input, self.running_mean, self.running_var, folded.weight, folded.bias, no_statistics, 0.0, self.eps
        )

    def _train(self, x: Tensor, folded: Folded) -> Tensor:
        return self._normalise(x, folded.weight, folded.bias, folded.on)

    def _normalise(self, x: Tensor, weight: Tensor, bias: Tensor, on: Tensor | None) -> Tensor:
        """Batch normalisation in training; running statistics move in the channels that are on."""
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if not self.track_running_stats or mean is None or var is None or count is None:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, self.eps)
        count.add_(1)
        mean_on, var_on = self._statistics_gates(on)
        cumulative = self.momentum is None
        # autograd remembers the statistics it was given and would notice a later write: what is written
        # afterwards goes through a copy.
        new_mean = mean.clone() if cumulative or mean_on is not None else mean
        new_var = var.clone() if cumulative or var_on is not None else var
        # A cumulative average needs 1 / count, which lives on the device: momentum 1 gives the batch's own
        # statistics, averaged below, without waiting for the number.
        momentum = 1.0 if self.momentum is None else self.momentum
        y = F.batch_norm(x, new_mean, new_var, weight, bias, True, momentum, self.eps)
        with torch.no_grad():
            if cumulative:
                # At least float32: a count beyond 65504 is infinite in half precision.
                wide = torch.promote_types(mean.dtype, torch.float32)
                share = count.to(wide).reciprocal().to(mean.dtype)
                new_mean, new_var = torch.lerp(mean, new_mean, share), torch.lerp(var, new_var, share)
            _store(mean, new_mean, mean_on)
            _store(var, new_var, var_on)
        return y

    def _statistics_gates(self, on: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The channels in which running mean and running variance move; None for all of them.

        A cumulative average (momentum None) counts every batch, so that every channel must move.
        """
        gated = "none" if self.momentum is None else self.masks.gate_statistics
        return (None if gated == "none" else on), (on if gated == "both" else None)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MaskedBatchNorm":
        super()._apply(fn, recurse)
        self.masks.to(self.weight.device)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The masked classes are made at run time, and a sample in progress belongs to this module's graph
        # alone: pickle and deepcopy go through the plain class, without the sample.
        return _empty_masked, (self.plain_class,), {**self.__dict__, "folded": None}


class _MaskedSync(MaskedBatchNorm):
    """Across processes, torch's own SyncBatchNorm normalises, and the sample scales its output."""

    process_group: Any

    def _train(self, x: Tensor, folded: Folded) -> Tensor:
        if not self._synchronises():
            return super()._train(x, folded)
        if folded.n is None and folded.weight is not self.weight:
            raise ModelError(
                "Methods with a scale of their own cannot train SyncBatchNorms across processes. "
                "Keep plain BatchNorms (train.sync_batchnorm = false)."
            )
        mean, var = self.running_mean, self.running_var
        mean_before = None if mean is None else mean.clone()
        var_before = None if var is None else var.clone()
        y = _sync_forward(self, x)
        if folded.n is None:
            return y
        mean_on, var_on = self._statistics_gates(folded.on)
        with torch.no_grad():
            if mean is not None and mean_before is not None and mean_on is not None:
                _store(mean, mean_before, ~mean_on)
            if var is not None and var_before is not None and var_on is not None:
                _store(var, var_before, ~var_on)
        return y * folded.n.to(y.dtype).view(1, -1, *(1,) * (y.dim() - 2))

    def _synchronises(self) -> bool:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return False
        return distributed.get_world_size(self.process_group or distributed.group.WORLD) > 1


class _MaskedAct(MaskedBatchNorm):
    """timm's layers apply a dropout (often the identity) and their activation after the BatchNorm."""

    act: nn.Module
    drop: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


def uncounted() -> AbstractContextManager[Any]:
    """Hide what is drawn from activation checkpoints, which count the tensors that a forward saves for backward."""
    if torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def mask_(bn: _BatchNorm, masks: Decision, number: int) -> MaskedBatchNorm:
    """Turn a BatchNorm into a masked one, in place, and return it."""
    bn.__class__ = _masked_class(type(bn))
    masked = cast(MaskedBatchNorm, bn)
    masked.masks, masked.number, masked.folded = masks, number, None
    return masked


def unmask_(bn: _BatchNorm) -> _BatchNorm:
    """Turn a masked BatchNorm back into a plain one, in place; a plain one is left as it is."""
    if isinstance(bn, MaskedBatchNorm):
        plain = bn.plain_class
        del bn.masks, bn.number, bn.folded
        cast(Any, bn).__class__ = plain
    return bn


def is_masked(module: nn.Module) -> bool:
    """Whether :func:`mask_` has been applied to the module."""
    return isinstance(module, MaskedBatchNorm)


# One masked class for each plain one, so that types can be compared.
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


def _store(running: Tensor, new: Tensor, on: Tensor | None) -> None:
    if on is not None:
        torch.where(on, new, running, out=running)
    elif new is not running:
        running.copy_(new)
