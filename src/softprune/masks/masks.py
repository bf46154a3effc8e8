"""The masks of all sites of a model, and the hooks that prepare them for each forward pass.

A mask takes about seventy operations on a few hundred numbers. Launched from Python for each site, they would cost more
than the BatchNorms themselves, so they are computed once over a vector of the channels of all sites.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from softprune.errors import ModelError
from softprune.graph import check_is_module
from softprune.graph.channels import Site
from softprune.mask_config import GateStatistics, MaskConfig
from softprune.masks.batchnorm import Folded, MaskedBatchNorm, fold, is_masked, mask_, uncounted, unmask_
from softprune.masks.functional import (
    alive_probability,
    dead_edges,
    dead_probability,
    hard_mask,
    relaxed_sample,
    sparsity_terms,
)
from softprune.masks.layout import Layout, keep_common, padded
from softprune.rng import Clock, channel_words, in_backward, logistic_noise

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward pass."""


class HookOwner:
    """Base class of objects whose methods are hooks of a masked model. Removing the masks removes these hooks."""


class Masks(HookOwner):
    """The masks of all sites of a model, whose BatchNorms are masked in place.

    Vectors (called rows) contain the channels of all sites; `slices` gives the slice of each site. Tensors change in
    place only, so that compiled steps and captured CUDA graphs see the changes.

    Args:
        network: The network, masked in place.
        sites: The sites of the network.
        clock: Counts forward passes and determines the noise.
        floors: Minimum number of channels that each site keeps, by name.
        round_to: The number of channels that a site keeps is a multiple of this.
        coupled: Groups of coupled sites with the same floor, which lose every channel that one of them drops.
    """

    shared: ClassVar[tuple[str, ...]] = ()
    """Names of tensors with the decision. Deep copies of the model, such as an EMA, share them. They move to another
    device with the model, but not with a copy."""
    transient: ClassVar[tuple[str, ...]] = ()
    """Names of attributes of the current forward pass, which are not copied."""
    gate_statistics: GateStatistics = "none"
    """Which running statistics are not updated in channels whose sampled mask is at most 1/2."""

    def __init__(
        self,
        network: nn.Module,
        sites: Iterable[Site],
        clock: Clock | None = None,
        *,
        floors: Mapping[str, int] | None = None,
        round_to: int = 1,
        coupled: Iterable[Sequence[str]] = (),
    ) -> None:
        self.sites = tuple(sites)
        self.layout = Layout(self.sites, network)
        self.slices = self.layout.slices
        self.modules: tuple[Any, ...] = self.layout.modules(network)
        self.columns = self.layout.columns
        """Slice of the channels of each masked BatchNorm."""
        self.device: torch.device = self.modules[0].weight.device
        self.clock = Clock(device=self.device) if clock is None else clock
        self._is_copy = False
        self._words: tuple[int, Tensor] | None = None
        floors = floors or {}
        self.floors = torch.tensor([floors.get(site.name, 0) for site in self.layout.sites], device=self.device)
        self.round_to, self._fills = round_to, round_to > 1 or any(floors.values())
        self._common = [(tuple(group), floors.get(group[0], 0)) for group in coupled if floors.get(group[0], 0)]
        for number in range(len(self.columns)):
            mask_(self.modules[number], self, number)
        self.layout.to(self.device)

    @property
    def members(self) -> dict[str, MaskedBatchNorm]:
        """The masked BatchNorms by name."""
        return dict(zip(self.layout.members, self.modules, strict=False))

    def fold(self, bn: MaskedBatchNorm) -> Folded:
        """Return scale and shift of a masked BatchNorm in the current forward pass."""
        raise NotImplementedError

    def hard(self, network: nn.Module | None = None) -> Tensor:
        """Return the hard masks, True for kept channels. `network`: a copy such as an EMA, masked or not."""
        raise NotImplementedError

    def dead(self, network: nn.Module | None = None) -> Tensor:
        """Return True for dead channels, some of which may be kept by a floor or a multiple."""
        return ~self.hard(network)

    def by_site(self, row: Tensor) -> dict[str, Tensor]:
        """Split a row into the parts of the sites, by name."""
        return {site.name: row[self.slices[site.name]] for site in self.sites}

    def row(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the parts of the sites to a row."""
        return torch.cat([by_site[site.name].to(self.device) for site in self.layout.sites])

    def filled(self, keep: Tensor, scores: Tensor) -> Tensor:
        """Return `keep` with the highest-scoring further channels that floors and multiples require."""
        scores = scores if scores.is_floating_point() else scores.double()
        kept_first = torch.where(keep, torch.inf, scores)
        for group, floor in self._common:
            common = keep_common([kept_first[self.slices[name]] for name in group], floor)
            for name in group:
                keep[self.slices[name]] |= common
        return self.layout.fill_up(keep, scores, self.round_to, self.floors)

    @property
    def words(self) -> Tensor:
        """The constant part of the noise hash, (channels,)."""
        if self._words is None or self._words[0] != self.clock.seed:
            numbers = {site.name: number for number, site in enumerate(self.sites)}
            words = [channel_words(self.clock.seed, numbers[site.name], site.width) for site in self.layout.sites]
            self._words = self.clock.seed, torch.cat(words).to(self.device)
        return self._words[1]

    def prepare(self, training: bool) -> None:
        """Prepare the masks of all sites for the next forward pass."""

    def begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of the model."""
        if in_backward():
            return
        if module.training:
            if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
                # Sampled masks are kept after the forward pass, and pruner.loss reads the network's own parameters.
                raise ModelError(
                    "a masked network must be trained by autograd. Got a training forward pass in a torch.func "
                    "transform; use loss.backward() or torch.autograd.grad, or call the network in eval mode."
                )
            self.clock.begin_forward()
            self.note_inputs(args, kwargs)
        self.prepare(module.training)

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the inputs of a training forward pass if a budget needs them."""

    def draw_ahead(self, chain: Chain) -> None:
        """Sample the masks of the next training forward pass now, if the method samples masks."""

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model."""

    def to(self, device: torch.device) -> None:
        """Move to the device of the model."""
        if device == self.device:
            return
        self.device = device
        self.layout.to(device)
        self.floors = self.floors.to(device)
        self.clock.to(device)
        self._words = None
        for name in () if self._is_copy else self.shared:
            value: Tensor | None = getattr(self, name)
            if value is not None:
                setattr(self, name, value.detach().to(device).requires_grad_(value.requires_grad))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the decision, to resume from."""
        return {name: getattr(self, name).detach().clone() for name in self.shared}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict`, in place."""
        for name, value in state.items():
            getattr(self, name).data.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = copy.copy(self)
        memo[id(self)] = made
        for name, value in vars(self).items():
            if name not in (*self.shared, *self.transient):
                setattr(made, name, copy.deepcopy(value, memo))
        made._is_copy = True
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self.transient}


class StoredMasks(Masks):
    """Masks that are set by the method, such as those of ranking methods."""

    shared: ClassVar[tuple[str, ...]] = ("keep",)
    masked_training = True
    """Whether the masks are applied in training; otherwise the BatchNorms train like plain ones."""
    masked_evaluation = True
    """Whether the masks are applied in evaluation."""

    def __init__(self, network: nn.Module, sites: Iterable[Site], clock: Clock | None = None, **rules: Any) -> None:
        super().__init__(network, sites, clock, **rules)
        self.keep = torch.ones(self.layout.channels, dtype=torch.bool, device=self.device)

    def kept(self, bn: MaskedBatchNorm) -> Tensor:
        """Return the mask of a masked BatchNorm."""
        return self.keep[self.columns[bn.number]].to(bn.weight.device)

    def fold(self, bn: MaskedBatchNorm) -> Folded:
        if not (self.masked_training if bn.training else self.masked_evaluation):
            return Folded(bn.weight, bn.bias)
        keep = self.kept(bn)
        if bn.training:
            return fold(keep.to(bn.weight), bn.weight, bn.bias)
        return Folded(torch.where(keep, bn.weight, 0.0), torch.where(keep, bn.bias, 0.0))

    def hard(self, network: nn.Module | None = None) -> Tensor:
        return self.keep


class SoftMasks(Masks):
    """SCP's masks, determined by the shift and scale of each BatchNorm, or by a budget.

    In training, masks are sampled in every forward pass. In evaluation, the hard masks are used.
    """

    shared = ("drop",)
    transient = ("inputs", "_folds", "_rows")
    inputs: Sequence[Call] = ()
    """Inputs of the most recent training forward passes, for a budget."""
    _folds: list[Folded] | None = None
    """Scale and shift of every masked BatchNorm in the current forward pass, kept until its backward pass is done."""
    _rows: tuple[Tensor, Tensor] | None = None
    drop: Tensor | None
    """Log-odds that a budget drops each channel: -inf for channels that are kept, inf for those that are off. None
    without a budget; then the shift and scale of a channel determine its mask."""

    def __init__(
        self, network: nn.Module, sites: Iterable[Site], clock: Clock, config: MaskConfig | None = None, **rules: Any
    ) -> None:
        sites, config = tuple(sites), config or MaskConfig()
        for site in sites:
            dead_edges(site.activation, config)  # raises for unknown names, and caches the bounds before compilation
        super().__init__(network, sites, clock, **rules)
        self.config, self.gate_statistics = config, config.gate_statistics
        self.drop = None
        self._samples = 0
        self._trial: Tensor | None = None
        self._drawn_ahead = False

    def record(self, samples: int) -> None:
        """Record the inputs of the last training forward passes, at least `samples` samples; 0 records none.

        From now on a budget determines the masks, by `drop`.
        """
        if self.drop is None:
            self.drop = torch.full((self.layout.channels,), -torch.inf, device=self.device)
        self._samples, self.inputs = samples, self.inputs if samples else ()

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the inputs of a training forward pass. Loops that compile the forward pass must call this."""
        if not self._samples or self._is_copy or torch.compiler.is_compiling():
            return
        self.inputs = [*self.inputs, (args, kwargs)]
        while len(self.inputs) > 1 and sum(map(_samples, self.inputs[1:])) >= self._samples:
            self.inputs = self.inputs[1:]

    def inputs_to_save(self) -> list[Call]:
        """Return the recorded inputs, except those that the next step will replace anyway."""
        replaced = len(self.inputs) == 1 and _samples(self.inputs[0]) >= self._samples
        return [] if replaced else [*self.inputs]

    def restore_inputs(self, inputs: list[Call]) -> None:
        self.inputs = [tree_map_only(Tensor, lambda tensor: tensor.to(self.device), call) for call in inputs]

    def state_dict(self) -> dict[str, Tensor]:
        return {}  # the masks follow from the weights, or from the state of the budget

    @contextmanager
    def trial(self) -> Iterator[Tensor]:
        """Yield a row of masks, which are used for evaluation within the block."""
        self._trial = self.hard().clone()
        try:
            yield self._trial
        finally:
            self._trial = None

    # --- statistics of the channels ----------------------------------------------------------------------------

    def parameters(self, network: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Return beta and gamma of all BatchNorms, each concatenated to a row."""
        norms: Any = self.modules if network is None else self.layout.modules(network)
        return (
            torch.cat([bn.bias.to(self.device) for bn in norms]),
            torch.cat([bn.weight.to(self.device) for bn in norms]),
        )

    def _at_points(self, function: Callable[..., Tensor], beta: Tensor, gamma: Tensor) -> Tensor:
        """Apply a function of shift, scale and activation to every point."""
        beta, gamma = self.layout.at_points(beta, gamma)
        if len(self.layout.segments) == 1:
            return function(beta, gamma, self.config, self.layout.segments[0][0])
        return torch.cat(
            [function(beta[here], gamma[here], self.config, activation) for activation, here in self.layout.segments]
        )

    def dead_probability(self, beta: Tensor, gamma: Tensor) -> Tensor:
        """Return the dead probability of each channel, the minimum over the points of its site."""
        dead = self._at_points(dead_probability, beta, gamma)
        return self.layout.over_points(dead, 2.0, lambda each: each.amin(0))

    def alive(self, network: nn.Module | None = None) -> Tensor:
        """Return the probability that each channel is alive, the maximum over the points of its site."""
        alive = self._at_points(alive_probability, *self.parameters(network))
        return self.layout.over_points(alive, -1.0, lambda each: each.amax(0))

    @torch.no_grad()
    def dead(self, network: nn.Module | None = None) -> Tensor:
        return ~hard_mask(self.dead_probability(*self.parameters(network)), self.config)

    @torch.no_grad()
    def hard(self, network: nn.Module | None = None) -> Tensor:
        if self._trial is not None:
            return self._trial
        if self.drop is not None:
            return self.drop.to(self.device) < 0
        keep = ~self.dead(network)
        return self.filled(keep, self.alive(network)) if self._fills else keep

    # --- training ----------------------------------------------------------------------------------------------

    def sample(self, beta: Tensor, gamma: Tensor) -> Folded:
        """Sample the masks of all channels, folded into scale and shift of the BatchNorms."""
        dead = self.dead_probability(beta, gamma)
        noise = logistic_noise(self.clock, self.words, dead.dtype)
        n = relaxed_sample(dead, noise, self.config, None if self.drop is None else self.drop.to(self.device))
        n = self.layout.at_members(n)
        return fold(n, gamma[: len(n)], beta[: len(n)])

    def channel_terms(self) -> Tensor:
        """Return the sparsity loss of each channel, for methods that select channels."""
        terms = self._at_points(sparsity_terms, *self.parameters())
        return self.layout.over_points(terms, 0.0, lambda each: each.sum(0))

    def loss(self) -> Tensor:
        """Return L_sparse of all sites, equation 15 (eq:sparsity_loss)."""
        terms = self._at_points(sparsity_terms, *(self._rows or self.parameters()))
        if self.layout.owner is not None:
            # Points of a stream that enters a site count in the loss of their own site.
            terms = terms * padded(terms.new_ones(self.layout.channels))[self.layout.owner[0]]
        return terms.sum()

    # --- forward passes ----------------------------------------------------------------------------------------

    def draw_ahead(self, chain: Chain) -> None:
        """Sample the masks of the next training forward pass now; :meth:`loss` then uses the same rows of parameters.

        In a compiled forward pass the masks are then inputs. If it sampled them itself, the compiler would generate a
        separate kernel for every site, since each site has another slice of the row.
        """
        self.clock.begin_forward()
        self._rows = self.parameters()
        self._hand_out(chain(self, *self._rows))
        self._drawn_ahead = True

    def begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and self._drawn_ahead and not in_backward():
            self._drawn_ahead = False
            self.note_inputs(args, kwargs)
            return
        super().begin_forward(module, args, kwargs)

    def prepare(self, training: bool) -> None:
        with uncounted():
            self._hand_out(self._draw(training))

    def _draw(self, training: bool) -> Folded:
        """Return scale and shift of all BatchNorms, with sampled masks in training and hard masks otherwise."""
        if training:
            return self.sample(*self.parameters())
        keep = self.layout.at_members(self.hard())
        beta, gamma = (row[: len(keep)] for row in self.parameters())
        return Folded(torch.where(keep, gamma, 0.0), torch.where(keep, beta, 0.0))

    def _hand_out(self, drawn: Folded) -> None:
        self._folds = self._split(drawn)
        if drawn.n is not None and drawn.weight.requires_grad and not torch.compiler.is_compiling():
            # Activation checkpoints recompute the forward pass in the backward pass and must get the same masks. This
            # gradient is complete when the backward pass has processed every site.
            drawn.weight.register_hook(lambda gradient: self._forget())

    def _forget(self) -> None:
        self._folds = self._rows = None

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            self._folds = None  # no backward pass follows, or it does not need them

    def _split(self, drawn: Folded) -> list[Folded]:
        count = len(self.layout.widths)
        columns = [[None] * count if part is None else part.split(self.layout.widths) for part in drawn]
        found = zip(self.modules, *columns, strict=False)
        return [
            Folded(_aligned(weight.to(bn.weight)), _aligned(bias.to(bn.weight)), *drawn)
            for bn, weight, bias, *drawn in found
        ]

    def fold(self, bn: MaskedBatchNorm) -> Folded:
        folded = None if self._folds is None else self._folds[bn.number]
        if folded is not None and (folded.n is not None) == bn.training and self.clock.now() is self.clock.reading:
            return folded
        with uncounted():  # a submodule is called on its own, or a checkpoint recomputes an earlier forward pass
            return self._split(self._draw(bn.training))[bn.number]


def _aligned(part: Tensor) -> Tensor:
    """Return a part of a row as kernels of cuDNN may read it, 16 bytes at a time: a copy where it begins in between."""
    if torch.compiler.is_compiling() or not part.is_cuda or part.storage_offset() * part.element_size() % 16 == 0:
        return part
    return part.clone()


def _samples(call: Call) -> int:
    tensors = (each for each in (*call[0], *call[1].values()) if isinstance(each, Tensor) and each.dim())
    return next((len(each) for each in tensors), 1)


Chain = Callable[[SoftMasks, Tensor, Tensor], Folded]
"""Function that samples the masks: :meth:`SoftMasks.sample`, or a compiled version of it."""
draw_chain: Chain = SoftMasks.sample


def hook_root_(model: nn.Module, masks: Masks) -> None:
    """Register the forward hooks of the masks on `model`."""
    model.register_forward_pre_hook(masks.begin_forward, with_kwargs=True)
    model.register_forward_hook(masks.end_forward)


def mask_sites_(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Apply fixed masks, by name, to BatchNorms of a plain model, in place."""
    if masks:
        stored = StoredMasks(model, [Site(name, len(mask), "relu") for name, mask in masks.items()])
        stored.keep.copy_(stored.row(masks))


def unmask_model_(model: nn.Module) -> None:
    """Remove all masks and hooks of softprune from `model`, in place."""
    for module in model.modules():
        if is_masked(module):
            unmask_(module)  # type: ignore[arg-type]
        kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        for hooks in kinds:
            ours = [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), HookOwner)]
            for key in ours:
                del hooks[key]


def check_unmasked(model: nn.Module, purpose: str, *, name: str = "model") -> None:
    """Raise a ModelError unless `model` is a module without masks. `purpose` and `name` are for the message."""
    check_is_module(model, name)
    masked = [path for path, module in model.named_modules() if is_masked(module)]
    if masked:
        raise ModelError(
            f"{purpose} needs a network without masks. Got `{name}` with {len(masked)} BatchNorms masked by a pruner, "
            f"'{masked[0]}' first. Call pruner.detach() first, or pass the result of pruner.compact() or a newly built "
            "network."
        )
