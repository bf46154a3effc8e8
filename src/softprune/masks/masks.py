"""All masks of a model at once: who decides about the channels, and the hooks that count and prepare forwards.

A mask is some seventy operations on a few hundred numbers. Launched site by site from Python they cost more
than the BatchNorms themselves; over the channels of all sites in one row they are one short chain.
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
    """What has bound methods as hooks of a masked model: they are removed with the masks."""


class Masks(HookOwner):
    """The masks of all sites of a model, whose BatchNorms are masked in place.

    The channels of all sites stand in one row; `slices` says where. Tensors change in place only, so that compiled
    steps and captured CUDA graphs see it.

    Args:
        network: The network; masked in place.
        sites: Its sites.
        clock: Counts the forward passes, and drives the noise.
        floors: The fewest channels that a site keeps, by name.
        round_to: The multiple of channels that a site keeps.
        coupled: Groups of sites, with the same floor, of which only channels that all of them keep are left.
    """

    shared: ClassVar[tuple[str, ...]] = ()
    """Tensors that hold the decision. A deep copy of the model (an EMA, say) shares them: they follow the model to
    another device, and stay there where a copy is moved."""
    transient: ClassVar[tuple[str, ...]] = ()
    """What a forward in progress has drawn, which belongs to its graph alone."""
    gate_statistics: GateStatistics = "none"
    """Which running statistics are not updated in channels whose sample is at most 1/2."""

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
        """The channels of each masked BatchNorm."""
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
        """Return the affine of a masked BatchNorm in the forward that calls it."""
        raise NotImplementedError

    def hard(self, network: nn.Module | None = None) -> Tensor:
        """Return the decision, True where a channel is kept. `network`: an EMA or other copy, masked or not."""
        raise NotImplementedError

    def dead(self, network: nn.Module | None = None) -> Tensor:
        """Return True where a channel is dead; a multiple or a floor may keep it nevertheless."""
        return ~self.hard(network)

    def by_site(self, row: Tensor) -> dict[str, Tensor]:
        """Return the part of a row of channels that each site has."""
        return {site.name: row[self.slices[site.name]] for site in self.sites}

    def row(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return the row of channels from its parts."""
        return torch.cat([by_site[site.name].to(self.device) for site in self.layout.sites])

    def filled(self, keep: Tensor, scores: Tensor) -> Tensor:
        """Return a row `keep`, filled up to floors and multiples with the channels of the highest scores."""
        scores = scores if scores.is_floating_point() else scores.double()
        kept_first = torch.where(keep, torch.inf, scores)
        for group, floor in self._common:
            common = keep_common([kept_first[self.slices[name]] for name in group], floor)
            for name in group:
                keep[self.slices[name]] |= common
        return self.layout.fill_up(keep, scores, self.round_to, self.floors)

    @property
    def words(self) -> Tensor:
        """The part of the noise's hash that belongs to each channel."""
        if self._words is None or self._words[0] != self.clock.seed:
            numbers = {site.name: number for number, site in enumerate(self.sites)}
            words = [channel_words(self.clock.seed, numbers[site.name], site.width) for site in self.layout.sites]
            self._words = self.clock.seed, torch.cat(words).to(self.device)
        return self._words[1]

    def prepare(self, training: bool) -> None:
        """Compute what the forward pass that follows needs of all sites."""

    def begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a forward pass of the model: the hook before it."""
        if in_backward():
            return
        if module.training:
            if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
                # What is drawn is kept for later forwards, and pruner.loss reads the network's own parameters.
                raise ModelError(
                    "a masked network trains by autograd. Got a training forward in a transform of torch.func; use "
                    "loss.backward() or torch.autograd.grad, or call the network in eval mode."
                )
            self.clock.begin_forward()
            self.note_inputs(args, kwargs)
        self.prepare(module.training)

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the inputs of a training forward, where a budget needs them."""

    def draw_ahead(self, chain: Chain) -> None:
        """Draw the masks of the next training forward now, where masks are drawn."""

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward pass of the model: the hook after it."""

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
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
        """Return what is stored of the decision, to resume from."""
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
    """Stored masks, for methods that decide elsewhere, or have decided."""

    shared: ClassVar[tuple[str, ...]] = ("keep",)
    masked_training = True
    """Whether the masks act in training. Otherwise the BatchNorms train as plain ones."""
    masked_evaluation = True
    """Whether they act in evaluation."""

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
    """SCP's masks: each BatchNorm's own shift and scale say how likely a channel is dead.

    A mask is drawn for every channel and training forward; in evaluation the hard mask is in force.
    """

    shared = ("drop",)
    transient = ("inputs", "_folds", "_rows")
    inputs: Sequence[Call] = ()
    """Of the last training forwards, for a budget."""
    _folds: list[Folded] | None = None
    """The affine of every masked BatchNorm in the forward in progress, or in the one that goes backward."""
    _rows: tuple[Tensor, Tensor] | None = None
    drop: Tensor | None
    """The log-odds that a budget drops each channel: -inf for those that stay, inf for those that are off. None without
    a budget, when each channel's own shift and scale decide."""

    def __init__(
        self, network: nn.Module, sites: Iterable[Site], clock: Clock, config: MaskConfig | None = None, **rules: Any
    ) -> None:
        sites, config = tuple(sites), config or MaskConfig()
        for site in sites:
            dead_edges(site.activation, config)  # refuses an unknown name now, and solves before anything is compiled
        super().__init__(network, sites, clock, **rules)
        self.config, self.gate_statistics = config, config.gate_statistics
        self.drop = None
        self._samples = 0
        self._trial: Tensor | None = None
        self._drawn_ahead = False

    def record(self, samples: int) -> None:
        """Keep the inputs of the last training forwards that together hold `samples` samples; 0 keeps none.

        The masks are a budget's from here on: `drop` decides.
        """
        if self.drop is None:
            self.drop = torch.full((self.layout.channels,), -torch.inf, device=self.device)
        self._samples, self.inputs = samples, self.inputs if samples else ()

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the inputs of a training forward, if they are recorded. Loops that compile the forward call this."""
        if not self._samples or self._is_copy or torch.compiler.is_compiling():
            return
        self.inputs = [*self.inputs, (args, kwargs)]
        while len(self.inputs) > 1 and sum(map(_samples, self.inputs[1:])) >= self._samples:
            self.inputs = self.inputs[1:]

    def inputs_to_save(self) -> list[Call]:
        """Return the inputs of past steps that the next step does not replace."""
        replaced = len(self.inputs) == 1 and _samples(self.inputs[0]) >= self._samples
        return [] if replaced else [*self.inputs]

    def restore_inputs(self, inputs: list[Call]) -> None:
        self.inputs = [tree_map_only(Tensor, lambda tensor: tensor.to(self.device), call) for call in inputs]

    def state_dict(self) -> dict[str, Tensor]:
        return {}  # what decides is in the weights, or in the budget's state

    @contextmanager
    def trial(self) -> Iterator[Tensor]:
        """Evaluate with other masks for a while: those that are written into the row that this yields."""
        self._trial = self.hard().clone()
        try:
            yield self._trial
        finally:
            self._trial = None

    # --- what is known of the channels -------------------------------------------------------------------------

    def parameters(self, network: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Return beta and gamma of all BatchNorms in one row."""
        norms: Any = self.modules if network is None else self.layout.modules(network)
        return (
            torch.cat([bn.bias.to(self.device) for bn in norms]),
            torch.cat([bn.weight.to(self.device) for bn in norms]),
        )

    def _at_points(self, function: Callable[..., Tensor], beta: Tensor, gamma: Tensor) -> Tensor:
        """Return a function of shift, scale and activation of every point."""
        beta, gamma = self.layout.at_points(beta, gamma)
        if len(self.layout.segments) == 1:
            return function(beta, gamma, self.config, self.layout.segments[0][0])
        return torch.cat(
            [function(beta[here], gamma[here], self.config, activation) for activation, here in self.layout.segments]
        )

    def dead_probability(self, beta: Tensor, gamma: Tensor) -> Tensor:
        """Return how likely each channel is dead: at the point of its site where that is least likely."""
        dead = self._at_points(dead_probability, beta, gamma)
        return self.layout.over_points(dead, 2.0, lambda each: each.amin(0))

    def alive(self, network: nn.Module | None = None) -> Tensor:
        """Return how likely each channel is alive."""
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
        """Draw a mask of every channel, folded into the affines of all BatchNorms."""
        dead = self.dead_probability(beta, gamma)
        noise = logistic_noise(self.clock, self.words, dead.dtype)
        n = relaxed_sample(dead, noise, self.config, None if self.drop is None else self.drop.to(self.device))
        n = self.layout.at_members(n)
        return fold(n, gamma[: len(n)], beta[: len(n)])

    def channel_terms(self) -> Tensor:
        """Return the sparsity loss of every channel, for losses that pick their channels."""
        terms = self._at_points(sparsity_terms, *self.parameters())
        return self.layout.over_points(terms, 0.0, lambda each: each.sum(0))

    def loss(self) -> Tensor:
        """Return L_sparse of all sites, equation 15 (eq:sparsity_loss)."""
        terms = self._at_points(sparsity_terms, *(self._rows or self.parameters()))
        if self.layout.owner is not None:
            # A stream that enters a site has masks of its own, whose loss is counted there.
            terms = terms * padded(terms.new_ones(self.layout.channels))[self.layout.owner[0]]
        return terms.sum()

    # --- forward passes ----------------------------------------------------------------------------------------

    def draw_ahead(self, chain: Chain) -> None:
        """Draw the masks of the next training forward now, and let :meth:`loss` read the same row of parameters.

        For a forward that is compiled: its samples are then inputs. Were they drawn inside, the compiler would
        write a kernel of its own for every site, because each finds its channels at another place in the row.
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
        """Return the affines of all BatchNorms: with samples in training, with the hard masks otherwise."""
        if training:
            return self.sample(*self.parameters())
        keep = self.layout.at_members(self.hard())
        beta, gamma = (row[: len(keep)] for row in self.parameters())
        return Folded(torch.where(keep, gamma, 0.0), torch.where(keep, beta, 0.0))

    def _hand_out(self, drawn: Folded) -> None:
        self._folds = self._split(drawn)
        if drawn.n is not None and drawn.weight.requires_grad and not torch.compiler.is_compiling():
            # Activation checkpointing runs the forward again inside backward and must meet the same samples;
            # this gradient is complete once every site is through.
            drawn.weight.register_hook(lambda gradient: self._forget())

    def _forget(self) -> None:
        self._folds = self._rows = None

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            self._folds = None  # no backward comes, or it needs none

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
        with uncounted():  # called alone, or by an activation checkpoint that recomputes an earlier forward
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
"""What draws the masks: :meth:`SoftMasks.sample`, or that function compiled."""
draw_chain: Chain = SoftMasks.sample


def hook_root_(model: nn.Module, masks: Masks) -> None:
    """Let `model` count its forward passes, and prepare their masks, in place."""
    model.register_forward_pre_hook(masks.begin_forward, with_kwargs=True)
    model.register_forward_hook(masks.end_forward)


def mask_sites_(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Mask BatchNorms of a plain model with fixed masks, by name, in place."""
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
    """Raise a ModelError unless `model`, which the caller calls `name`, is a network without masks, for `purpose`."""
    check_is_module(model, name)
    masked = [path for path, module in model.named_modules() if is_masked(module)]
    if masked:
        raise ModelError(
            f"{purpose} needs a network without masks. Got `{name}` with masks on {len(masked)} of its BatchNorms "
            f"('{masked[0]}' is the first), from a pruner that still works on it. Call pruner.detach() first, or "
            "pass what pruner.compact() returned, or a newly built network."
        )
