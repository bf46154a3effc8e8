"""All masks of a model at once: their samples, the hooks that count forwards, and their removal.

A mask is some seventy operations on a few hundred numbers. Launched site by site from Python they cost more
than the BatchNorms themselves; over the concatenated channels of all sites they are one short chain.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softprune.errors import ModelError
from softprune.graph import check_is_module
from softprune.mask_config import MaskConfig
from softprune.masks.batchnorm import Folded, MaskedBatchNorm, fold, is_masked, uncounted, unmask_
from softprune.masks.functional import dead_probability, relaxed_sample, sparsity_loss, sparsity_terms
from softprune.masks.gates import MaskDecision, SoftGate
from softprune.masks.sites import EnteringPoints, dead_at_every_point, join_points, steepness, with_entering
from softprune.rng import Clock, channel_words, in_backward, logistic_noise


@dataclass(frozen=True)
class SiteBatch:
    """Sites whose channels may stand in one tensor."""

    modules: list[MaskedBatchNorm]
    """One BatchNorm of each site; where sites have several, the first ones of all sites, then the second ones, ..."""
    structure: tuple[int, ...]
    """BatchNorms per point, the same in all sites; see :mod:`softprune.masks.sites`."""
    entering: EnteringPoints
    """Streams that enter that of the site, which is the only one of its batch then."""
    config: MaskConfig
    activation: str
    clock: Clock
    words: Tensor
    decision: MaskDecision | None
    weighted: bool

    def allowed(self) -> Tensor:
        """Return the channels that a budget allows at all sites, concatenated."""
        gates = (module.gate for module in self.site_modules)
        return torch.cat([g.allowed for g in gates if isinstance(g, SoftGate) and g.allowed is not None])

    def loss(self, beta: Tensor, gamma: Tensor) -> Tensor:
        """Return the sparsity loss of all sites, given what :meth:`parameters` returned."""
        beta, gamma = self.sites(beta, gamma)
        if not self.weighted:
            return sparsity_loss(beta, gamma, self.config, self.activation)
        gates = (module.gate for module in self.site_modules)
        weights = [g.weight for g in gates if isinstance(g, SoftGate) and g.weight is not None]
        return (sparsity_terms(beta, gamma, self.config, self.activation) * torch.cat(weights)).sum()

    def slope(self) -> Tensor | None:
        """Return the learned slopes after all sites, one for each channel; None where they are not learned."""
        slopes = [steepness(bn) for bn in self.site_modules]  # of one kind: all are learned, or none
        each = [s.expand(bn.num_features) for bn, s in zip(self.site_modules, slopes, strict=True) if s is not None]
        return torch.cat(each) if each else None

    @property
    def site_modules(self) -> list[MaskedBatchNorm]:
        """One BatchNorm of each site."""
        return self.modules[: len(self.modules) // self.members]

    @property
    def members(self) -> int:
        """BatchNorms per site."""
        return sum(self.structure)

    def sites(self, beta: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Return beta and gamma of the sites from those of :meth:`parameters`."""
        if self.members == 1:
            return beta, gamma
        return join_points(beta.chunk(self.members), gamma.chunk(self.members), self.structure)

    def parameters(self) -> tuple[Tensor, Tensor]:
        """Return beta and gamma of all BatchNorms, concatenated."""
        return torch.cat([m.bias for m in self.modules]), torch.cat([m.weight for m in self.modules])


Chain = Callable[[SiteBatch, Tensor, Tensor], Folded]
"""What draws a batch's samples; :func:`draw_chain`, or that function compiled."""


def draw_chain(batch: SiteBatch, beta: Tensor, gamma: Tensor) -> Folded:
    """The samples of all sites of a batch in a row, folded into their affines."""
    points = with_entering(*batch.sites(beta, gamma), batch.entering)
    dead = dead_at_every_point(dead_probability(*points, batch.config, batch.activation, batch.slope()))
    n = relaxed_sample(dead, logistic_noise(batch.clock, batch.words, dead.dtype), batch.config)
    if batch.decision is not None:
        n = batch.decision.apply(n, batch.allowed())
    return fold(n if batch.members == 1 else n.repeat(batch.members), gamma, beta)


class MaskBank:
    """Draws the samples of all :class:`SoftGate` sites of a model in one chain of operations.

    Call :meth:`begin_forward` before each training forward of the model (after ``Clock.begin_forward``) and
    :meth:`end_forward` after it. The numbers are those that the gates would draw for themselves, gradients
    included; without the bank, or outside these calls, they do. Sites with another gate are left alone.

    Under torch.compile the bank keeps the graph small: one chain in place of one for each site.
    """

    def __init__(self, modules: Iterable[MaskedBatchNorm]) -> None:
        self.modules = list(modules)
        self._layout: list[tuple[Any, ...]] = []
        self._batches: list[SiteBatch] = []
        self._gathered: list[tuple[Tensor, Tensor]] | None = None
        self._in_graph = False

    def begin_forward(self) -> None:
        """Draw every site's sample for the forward that follows."""
        self._in_graph = False
        with uncounted():
            for batch in self._current_batches():
                self._hand_out(batch, draw_chain(batch, *batch.parameters()))

    def draw_ahead(self, chain: Chain = draw_chain) -> None:
        """Like :meth:`begin_forward`, and :meth:`loss` then reads the same row of parameters.

        For a forward that is compiled: its samples are then inputs. Were they drawn inside, the compiler would
        write a kernel of its own for every site, because each finds its channels at another place in the row.
        """
        self._in_graph = False
        self._gathered = [batch.parameters() for batch in self._current_batches()]
        for batch, (beta, gamma) in zip(self._batches, self._gathered, strict=True):
            self._hand_out(batch, chain(batch, beta, gamma))

    def _hand_out(self, batch: SiteBatch, drawn: Folded) -> None:
        widths = [module.num_features for module in batch.modules]
        columns = (part.split(widths) for part in drawn)
        for module, *parts in zip(batch.modules, *columns, strict=True):
            module.folded = Folded(*parts)
        if drawn.weight.requires_grad and not torch.compiler.is_compiling():
            # Activation checkpointing runs the forward again inside backward and must meet the same samples;
            # this gradient is complete once every site is through.
            drawn.weight.register_hook(lambda gradient: self.clear())
            self._in_graph = True

    def end_forward(self) -> None:
        """The forward is over: forget the samples, now or when backward has passed through them."""
        if not self._in_graph:
            self.clear()

    def clear(self) -> None:
        """Forget the samples, so that a forward outside the model's own draws afresh."""
        self._gathered = None
        for module in self.modules:
            module.folded = None

    def loss(self) -> Tensor:
        """Sparsity loss of all sites: the sum of their gates' losses."""
        if self._gathered is None:
            batches = self._current_batches()
            rows = [batch.parameters() for batch in batches]
        else:
            batches, rows = self._batches, self._gathered
        losses = [batch.loss(*row) for batch, row in zip(batches, rows, strict=True)]
        if not losses:
            raise ModelError("A sparsity loss needs at least one site with a SoftGate. Got none.")
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss.to(total.device)
        return total

    def __getstate__(self) -> dict[str, Any]:
        # What a forward in progress has gathered belongs to its graph alone.
        return {**self.__dict__, "_gathered": None}

    def _current_batches(self) -> list[SiteBatch]:
        """The sites by what their chain of operations depends on; rebuilt when any of it has changed."""
        layout = [_key(module) for module in self.modules]
        if layout != self._layout:
            members: dict[tuple[Any, ...], list[MaskedBatchNorm]] = {}
            for module, (_, *key) in zip(self.modules, layout, strict=True):
                first = module.group[0][0] if module.group else module  # it stands for the BatchNorms of its site
                if isinstance(module.gate, SoftGate) and module is first:
                    members.setdefault(tuple(key), []).append(module)
            self._batches = [_site_batch(modules) for modules in members.values()]
            self._layout = layout
        return self._batches


def _key(module: MaskedBatchNorm) -> tuple[Any, ...]:
    gate = module.gate
    if not isinstance(gate, SoftGate):
        return (gate,)
    weight = module.weight
    shared = (gate.clock, gate.clock.seed, gate.constants, gate.activation, _decision(gate), gate.weight is not None)
    alone = gate if module.entering else None
    return gate, *shared, weight.device, weight.dtype, alone, len(module.slopes) > 0, *_structure(module)


def _structure(module: MaskedBatchNorm) -> tuple[int, ...]:
    return tuple(len(point) for point in module.group) or (1,)


def _decision(gate: SoftGate) -> MaskDecision | None:
    """Return what puts the gate's allowed channels into force."""
    return None if gate.allowed is None else gate.decision


def _site_batch(modules: list[MaskedBatchNorm]) -> SiteBatch:
    """Return the batch of sites that `modules` stand for, one each."""
    gates = [module.gate for module in modules if isinstance(module.gate, SoftGate)]
    words = [
        channel_words(gate.clock.seed, gate.site, module.num_features, module.weight.device)
        for gate, module in zip(gates, modules, strict=True)
    ]
    first, sites = gates[0], [[bn for point in each.group for bn in point] or [each] for each in modules]
    members = [bn for column in zip(*sites, strict=True) for bn in column]
    return SiteBatch(
        members,
        _structure(modules[0]),
        modules[0].entering,
        first.config,
        first.activation,
        first.clock,
        torch.cat(words),
        _decision(first),
        first.weight is not None,
    )


class HookOwner:
    """What has bound methods as hooks of a masked model: they are removed with the masks."""


class RootHooks(HookOwner):
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
        if not module.training or in_backward():
            return
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            # What is drawn is kept for later forwards, and pruner.loss reads the network's own parameters.
            raise ModelError(
                "a masked network trains by autograd. Got a training forward in a transform of torch.func; use "
                "loss.backward() or torch.autograd.grad, or call the network in eval mode."
            )
        if not self._drawn_ahead:
            self.clock.begin_forward()
            self.bank.begin_forward()
        self._drawn_ahead = False

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a training forward."""
        if module.training and not in_backward():
            self.clock.end_forward()
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
