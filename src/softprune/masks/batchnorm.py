"""The masked BatchNorm: the paper's revised BN layer, put onto an existing module by swapping its class.

Parameters, buffers, hooks and every reference to the module stay as they are; the state_dict has the same
keys, and an optimizer made earlier still works.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.errors import ModelError
from softprune.graph.modules import is_timm_batch_norm
from softprune.masks.gates import AffineGate, FixedGate, Gate, SoftGate
from softprune.masks.sites import EnteringPoints, Slopes
from softprune.rng import in_backward

_sync_forward = cast(Callable[[_BatchNorm, Tensor], Tensor], nn.SyncBatchNorm.forward)


class Folded(NamedTuple):
    """A sampled mask, folded into the affine of the BatchNorm it belongs to."""

    n: Tensor
    """The sample, one for each channel."""
    weight: Tensor
    """``n * gamma``."""
    bias: Tensor
    """``n * beta``."""
    on: Tensor
    """``n > 1/2``: channels whose running statistics move."""


def fold(n: Tensor, gamma: Tensor, beta: Tensor) -> Folded:
    """``(gamma z + beta) n``, equation 9 (eq:modified_bn), as an affine of z: no operation on activations is added."""
    return Folded(n, (n * gamma).to(gamma.dtype), (n * beta).to(beta.dtype), n.detach() > 0.5)


class MaskedBatchNorm(_BatchNorm):
    """What all masked BatchNorms have in common; made by :func:`mask_`, never constructed.

    Training normalises by batch statistics and scales by the gate's sample; evaluation scales by its hard
    mask. Off channels come out exactly zero in evaluation.
    """

    gate: Gate
    folded: Folded | None
    """The sample of the forward in progress, if a :class:`MaskBank` has drawn it for the whole model."""
    coupled: "tuple[MaskedBatchNorm, ...]"
    """The BatchNorms coupled to it: only channels that all of them keep are left."""
    group: "tuple[tuple[MaskedBatchNorm, ...], ...]"
    """The BatchNorms that share its mask, itself included, by points; empty where it has a mask of its own."""
    entering: EnteringPoints
    """BatchNorms of narrower streams that are added to that of `group`, with the channel of their first one there."""
    slopes: Slopes
    """Learned slopes of the activation after it."""
    plain_class: type[_BatchNorm]
    """The class that :func:`unmask_` gives back."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        return self._masked_train(input) if self.training else self._masked_eval(input)

    def _masked_train(self, x: Tensor) -> Tensor:
        if isinstance(self.gate, AffineGate):
            return self._normalise(x, *self.gate.masked_affine(self), None)
        folded = self._draw()
        if folded is None:
            return self._normalise(x, self.weight, self.bias, None)
        return self._normalise(x, folded.weight, folded.bias, folded.on)

    def _draw(self) -> Folded | None:
        if self.folded is not None and not self._recomputes_another():
            return self.folded
        with uncounted():
            n = self.gate.sample(self)
            return None if n is None else fold(n, self.weight, self.bias)

    def _recomputes_another(self) -> bool:
        """Whether an activation checkpoint recomputes a forward with another sample, or another graph, than `folded`.

        A reentrant one runs a backward pass of its own, which frees the graph that it goes through: not that of the
        samples, which all sites share. One that is not reentrant recomputes values alone.
        """
        if not in_backward():
            return False
        reentrant = torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        clock = cast(SoftGate, self.gate).clock
        return reentrant or clock.now() is not clock.reading

    def _masked_eval(self, x: Tensor) -> Tensor:
        if isinstance(self.gate, AffineGate):
            weight, bias = self.gate.masked_affine(self)
        else:
            keep = self.gate.hard(self)
            weight, bias = torch.where(keep, self.weight, 0.0), torch.where(keep, self.bias, 0.0)
        no_statistics = self.running_mean is None and self.running_var is None
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, no_statistics, 0.0, self.eps)

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
        gated = "none" if self.momentum is None else self.gate.gate_statistics
        return (None if gated == "none" else on), (on if gated == "both" else None)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gate={self.gate!r}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MaskedBatchNorm":
        super()._apply(fn, recurse)
        self.gate.to(self.weight.device)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The masked classes are made at run time, and a sample in progress belongs to this module's graph
        # alone: pickle and deepcopy go through the plain class, without the sample.
        return _empty_masked, (self.plain_class,), {**self.__dict__, "folded": None}


class _MaskedSync(MaskedBatchNorm):
    """Across processes, torch's own SyncBatchNorm normalises, and the sample scales its output."""

    process_group: Any

    def _masked_train(self, x: Tensor) -> Tensor:
        if not self._synchronises():
            return super()._masked_train(x)
        if isinstance(self.gate, AffineGate):
            raise ModelError(
                "Methods with a scale of their own cannot train SyncBatchNorms across processes. "
                f"Got {type(self.gate).__name__}. Keep plain BatchNorms (train.sync_batchnorm = false)."
            )
        folded = self._draw()
        mean, var = self.running_mean, self.running_var
        mean_before = None if mean is None else mean.clone()
        var_before = None if var is None else var.clone()
        y = _sync_forward(self, x)
        if folded is None:
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


def mask_(bn: _BatchNorm, gate: Gate) -> MaskedBatchNorm:
    """Turn a BatchNorm that can be a site into a masked one, in place, and return it. The gate follows its device."""
    if isinstance(gate, FixedGate) and gate.mask.numel() != bn.num_features:
        raise ModelError(
            f"A mask must have one boolean for each channel. Got {gate.mask.numel()} for {bn.num_features} channels."
        )
    plain = type(bn)
    bn.__class__ = _masked_class(plain)
    masked = cast(MaskedBatchNorm, bn)
    masked.gate = gate
    masked.folded = None
    masked.coupled = ()
    masked.group, masked.entering, masked.slopes = (), (), ()
    gate.to(bn.weight.device)
    return masked


def mask_group_(points: Sequence[Sequence[_BatchNorm]], gate: Gate, entering: EnteringPoints = ()) -> MaskedBatchNorm:
    """Turn BatchNorms that share one mask into masked ones, in place, and return the first of them.

    :mod:`softprune.masks.sites` says what points are, and what enters them.
    """
    group = tuple(tuple(mask_(bn, gate) for bn in point) for point in points)
    for point in group:
        for bn in point:
            bn.group, bn.entering = group, entering
    return group[0][0]


def unmask_(bn: _BatchNorm) -> _BatchNorm:
    """Turn a masked BatchNorm back into a plain one, in place; a plain one is left as it is."""
    if isinstance(bn, MaskedBatchNorm):
        plain = bn.plain_class
        del bn.gate, bn.folded
        for name in ("coupled", "group", "entering", "slopes"):
            bn.__dict__.pop(name, None)
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
