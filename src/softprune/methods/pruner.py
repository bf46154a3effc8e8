"""The pruner: a model whose BatchNorms are masked, the training loop's side, the decision, the cut and the state.

A method is a subclass that says who decides about the channels (:meth:`Pruner._make_masks`), what the loss gains and
what runs around a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from softprune.budget import Budget, BudgetStatus, Limit, PrunableNetwork
from softprune.cut import (
    Certificate,
    PrunePlan,
    blocks_of_sites,
    coupled_sites,
    cut_and_verify,
    make_plan,
    required_sites,
)
from softprune.cut.selection import Globs, nothing_to_prune, read_graph
from softprune.devices import WIDTH_MULTIPLE, default_multiple, fitting_multiple
from softprune.errors import CheckpointError, ConfigError, ModelError, first_few, is_integer
from softprune.graph import ChannelGraph, ExampleLike, Site, check_is_module
from softprune.log import get_logger
from softprune.masks import HookOwner, Masks, StoredMasks, hook_root_, is_masked, unmask_model_
from softprune.methods.options import Keep, RoundTo, check_round_to, check_strength, limits_by_site
from softprune.module_state import first_uninitialised, non_finite
from softprune.rng import Clock
from softprune.target import Target

logger = get_logger(__name__)

NARROW = 0.05
"""The share of a site's channels below which a network whose every path passes the site is said to collapse."""


class Pruner(HookOwner):
    """A pruning method applied to a model.

    The model's BatchNorms are masked in place: same parameters, same state_dict keys. Your loop, optimizer,
    scheduler and wrappers stay as they are. :class:`softprune.methods.options.PrunerOptions` has the other keywords,
    which all methods take.

    In the training loop: :meth:`parameter_groups`, :meth:`attach`, :meth:`loss`, :meth:`end_epoch`; to log,
    :meth:`metrics`, :attr:`status` and :attr:`penalty`. The decision: :meth:`masks`, :meth:`summary`, :meth:`decide`.
    The cut: :meth:`plan`, :meth:`compact`. To resume: :meth:`state_dict`, :meth:`load_state_dict`. The end:
    :meth:`release`, :meth:`detach`.

    Args:
        model: The network; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        strength: Weight of what the method adds to the loss.
    """

    name: ClassVar[str]
    """`method.name` in a recipe; a state to resume from must have the same."""
    description: ClassVar[str]
    """What it does, in a line."""
    continues: ClassVar[bool] = False
    """Whether training may continue after a physical cut: each channel is decided on its own."""
    capturable: ClassVar[bool] = True
    """Whether the work around a step consists of in-place tensor operations, which a CUDA graph can record."""
    penalised: ClassVar[bool] = False
    """Whether the method adds ``strength`` times a penalty to the loss."""
    shifts_decide: ClassVar[bool] = False
    """Whether the decision depends on BatchNorm shifts, on which weight decay would then act."""
    site_kinds: Iterable[str] = ()
    """Kinds of sites that it masks, beside BatchNorms that an activation reads: of "sum", "linear" and "stream"."""
    every_norm: bool = False
    """Whether it masks BatchNorms, too, that no activation follows, such as the last of a residual branch."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes with what the method was given, which a state to resume from must agree with."""
    updates_on_step: bool = True
    """Whether :meth:`update_strength` runs after every optimizer step."""
    certificate: Certificate | None = None
    """How close masked and compact network were at the last :meth:`compact`."""
    site_masks: Masks
    """Who decides about the channels of all sites."""
    norms: dict[str, Any]
    """The masked BatchNorm of every site; the first one where there are several."""
    has_target: bool = False
    """Whether a target decides how much is removed."""
    budget: Budget | None = None
    """Decides during the training, for a method that leaves the decision to a target."""
    _limit: Limit | None = None
    """The target's, where there is one."""

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 0.0,
        include: Globs | None = None,
        exclude: Globs | None = None,
        seed: int = 0,
        round_to: RoundTo | None = None,
        keep: Keep = 0.0,
        min_channels: int = 0,
    ) -> None:
        check_strength(strength)
        if not is_integer(min_channels) or min_channels < 0:
            raise ConfigError(f"min_channels must be an integer of at least 0. Got {min_channels!r}.")
        check_values(model)
        self.model = model
        self.graph = self._read(example, include=include, exclude=exclude)
        if not self.graph.sites:
            raise nothing_to_prune(model, self.graph, chosen=include is not None or exclude is not None)
        if self.graph.unreached:
            logger.warning(
                "softprune: the example does not lead to %s: what only they read may be cut away. "
                "Pass an example that does",
                first_few(self.graph.unreached),
            )
        self.example = self.graph.example
        device = next(model.parameters()).device
        self.required = required_sites(self.graph)
        """Sites that must not become empty: every path to an output passes through them."""
        self.coupled = coupled_sites(self.graph)
        """Groups of sites of which only the channels that all of them keep remain."""
        if round_to is None or round_to == "auto":
            round_to = self._multiple(device if round_to == "auto" else None)
        check_round_to(round_to)
        self.round_to, self.min_channels = int(round_to), int(min_channels)
        self.keep, self.most = limits_by_site(keep, self.sites)
        if min(self.most.values()) < 1 and not self.has_target:
            raise ConfigError(f"The most in `keep` needs a target, which chooses by it. Got {keep!r}; pass `target`.")
        self.floors = self._floors()
        """The fewest channels that each site keeps."""
        self.clock = Clock(seed, device)
        self._given_strength = float(strength)
        self._strength = torch.tensor(self._given_strength, device=device)
        self._optimizer: Optimizer | None = None
        self._handles: list[Any] = []
        self._begun = self._loss_called = self._checked = self._detached = False
        self._said: set[str] = set()
        self.site_masks = self._make_masks()
        hook_root_(model, self.site_masks)
        members = self.site_masks.members
        self.norms = {site.name: members[site.name] for site in self.sites}
        self._shapes = _shapes(model)

    def _multiple(self, device: torch.device | None) -> int:
        """Return the multiple of channels in which `device` is fast, or the default one."""
        widths, required = [site.width for site in self.sites], len(self.required)
        if device is not None:
            multiple = fitting_multiple(default_multiple(device), widths, required)
        else:  # where most sites hold it four times
            wide = self.has_target and fitting_multiple(2 * WIDTH_MULTIPLE, widths, required) == 2 * WIDTH_MULTIPLE
            multiple = WIDTH_MULTIPLE if wide else 1
        if multiple > 1:
            logger.info("softprune: widths are multiples of %d; round_to=1 allows all widths", multiple)
        return multiple

    # --- what a method defines -----------------------------------------------------------------------------------

    def _read(self, example: ExampleLike, **globs: Globs) -> ChannelGraph:
        """Return the channel graph with the sites that the method masks. `globs`: what to include and to exclude."""
        return read_graph(self.model, example, kinds=self.site_kinds, every_norm=self.every_norm, **globs)

    def _make_masks(self) -> Masks:
        """Mask the sites of `self.model` in place, and return who decides about their channels."""
        return StoredMasks(self.model, self.sites, self.clock, **self._rules())

    def _extra_loss(self) -> Tensor | None:
        """Return what the method adds to the task loss; None for nothing."""
        return None

    def _begin(self) -> None:
        """Run once, when a pruner that has not trained yet is attached."""

    def before_step(self) -> None:
        """Run before every optimizer step."""

    def after_step(self) -> None:
        """Run after every optimizer step."""

    def end_epoch(self, epoch: int) -> None:
        """Call after every epoch; most methods do nothing there."""

    @property
    def decided(self) -> bool:
        """Whether evaluation uses the masks. Methods that decide once, after training, do so in :meth:`decide`."""
        return True

    def decide(self) -> dict[str, Tensor]:
        """Finalise the decision, where the method takes it once after training, and return the masks in force."""
        return self.masks()

    def _fold_gates(self, network: nn.Module) -> nn.Module:
        """Return `network`, or a copy, whose plain BatchNorms compute what the masked ones do on kept channels."""
        return network

    # --- the sites -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        channels = sum(site.width for site in self.sites)
        return f"{type(self).__name__}({type(self.model).__name__}, {len(self.sites)} sites, {channels:,} channels)"

    @property
    def sites(self) -> tuple[Site, ...]:
        """The masked BatchNorms."""
        return self.graph.sites

    def _floors(self) -> dict[str, int]:
        """Return the floor of every site; all sites of a coupled group have the same."""
        floors = {}
        for site in self.sites:
            share = math.ceil(self.keep[site.name] * site.width - 1e-9)
            floors[site.name] = min(max(self.min_channels, share, int(site.name in self.required)), site.width)
        for group in self.coupled:
            floors |= dict.fromkeys(group, max(floors[name] for name in group))
        return floors

    def _rules(self) -> dict[str, Any]:
        """Return what all masks keep to."""
        return {"floors": self.floors, "round_to": self.round_to, "coupled": self.coupled}

    def _prunable(self) -> PrunableNetwork:
        """Return the network with the rules of its cuts, for a budget."""
        coupled = blocks_of_sites(self.graph, self.round_to)
        caps = {site.name: math.floor(self.most[site.name] * site.width + 1e-9) for site in self.sites}
        return PrunableNetwork(self.graph, self.model, self.example, self.floors, coupled, self.round_to, caps)

    def masks(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Return the hard mask of every site now, True where a channel is kept. `model`: an EMA or other copy."""
        self._check_in_place()
        network = None if model is None else self._network_of(model)
        return {name: mask.clone() for name, mask in self.site_masks.by_site(self.site_masks.hard(network)).items()}

    # --- the training loop -----------------------------------------------------------------------------------------

    @property
    def strength(self) -> Tensor:
        """The weight of what the method adds to the loss: a scalar on the device that may change during training."""
        device = self.clock.step.device
        if self._strength.device != device:
            self._strength = self._strength.to(device)
        return self._strength

    @strength.setter
    def strength(self, value: float | Tensor) -> None:
        check_strength(value)
        if self.budget is not None:
            raise ConfigError(
                "with a target there is no sparsity loss whose strength could be set. "
                f"Got strength = {float(value):g}; set it for a pruner without a target only."
            )
        self._set_strength(value)

    def _set_strength(self, value: float | Tensor) -> None:
        # In place, so that a captured CUDA graph sees the new value.
        self.strength.copy_(torch.as_tensor(value))

    @property
    def target(self) -> Target | None:
        """What the cut must meet; None without a target. It is set when the pruner is made."""
        return None if self._limit is None else self._limit.target

    @property
    def status(self) -> BudgetStatus | None:
        """Where the budget is; None without a target. Counts the cost of a cut now, so call it once per epoch."""
        return None if self._limit is None else self._limit.status(self.masks())

    def metrics(self) -> dict[str, float]:
        """Return what to log once per epoch: the strength, what share of the channels stays, and of the target."""
        kept, status = sum(int(mask.sum()) for mask in self.masks().values()), self.status
        found = {"channels_kept": kept / sum(site.width for site in self.sites), "strength": float(self.strength)}
        if status is not None:
            found |= {f"{status.target}_kept": status.cost / status.dense, "margin": status.margin}
        return found

    @property
    def penalty(self) -> Tensor:
        """What the method adds to the task loss at the current weights, without a gradient: for logging."""
        with torch.no_grad():
            extra = self._extra_loss()
        return torch.zeros((), device=self.clock.step.device) if extra is None else extra.detach()

    def loss(self, task: Tensor) -> Tensor:
        """Return the task loss plus what the method adds. Under eval() or no_grad the task loss is unchanged."""
        if not isinstance(task, Tensor):
            raise ConfigError(f"`task` must be the loss as a tensor. Got {type(task).__name__}; leave out .item().")
        if not self.model.training or not torch.is_grad_enabled():
            return task
        if not self._checked and not torch.compiler.is_compiling():
            self._check_in_place()
            self._network_of(None)  # here, since a forward pass may make layers
            self._checked = True
        if self._loss_called and self._optimizer is None and self.updates_on_step:
            self._warn_once(
                "no optimizer is attached, so no step is counted: call pruner.attach(optimizer) before the first step"
            )
        self._loss_called = True
        return self._total_loss(task)

    def _total_loss(self, task: Tensor) -> Tensor:
        """Return the task loss together with the method's own."""
        extra = self._extra_loss()
        return task if extra is None else task + extra.to(task.device)

    def attach(self, optimizer: Optimizer) -> None:
        """Count the optimizer's steps, and run the method's work around each of them, through its hooks."""
        self._check_in_place()
        if self._optimizer is optimizer:
            return  # a cell of a notebook that is run again
        if self._optimizer is not None:
            raise ConfigError(
                "a pruner is attached to one optimizer. Got a second one; attach the optimizer that steps the "
                "BatchNorms, once, or release() the first one before."
            )
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, bn in self.norms.items() if not {id(bn.bias), id(bn.weight)} <= owned]
        if missing:
            raise ConfigError(
                "the attached optimizer must train scale and shift of every site. Got one without those of "
                f"{first_few([*map(repr, missing)])}; make it from pruner.parameter_groups(), and set "
                "requires_grad=False on what should not train before you make the pruner."
            )
        groups = [group for group in optimizer.param_groups if float(group.get("weight_decay", 0) or 0) != 0]
        decayed = {id(parameter) for group in groups for parameter in group["params"]}
        names = [name for name, bn in self.norms.items() if self.shifts_decide and id(bn.bias) in decayed]
        if names:
            logger.warning(
                "softprune: weight decay acts on the shifts of %d masked BatchNorms (%s): it holds dead channels back "
                "and changes the method; use pruner.parameter_groups(weight_decay=...)",
                len(names),
                first_few(names),
            )
        self._optimizer = optimizer
        # In a compiled step, Dynamo would trace what runs on the host, for minutes.
        before, after = (torch.compiler.disable(hook) for hook in (self._before_step, self._after_step))
        before.network = after.network = self.model  # softprune.remap_optimizer leaves them behind
        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        if not self._begun:
            self._begin()
            self._begun = True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Run the work before a step or, if a closure computes the gradients, after each of its calls."""

        def work() -> None:
            if self.budget is not None:
                self.budget.before_step()
            self.before_step()

        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            work()
            return None

        def wrapped(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            work()
            return result

        return (optimizer, *args[2:]), {**kwargs, "closure": wrapped}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.penalised and self.updates_on_step and not self._loss_called:
            self._warn_once(
                "an optimizer step ran without pruner.loss(...), so nothing was added to the task loss: call "
                "loss = pruner.loss(task_loss) before loss.backward(), with the model in training mode"
            )
        self._loss_called = False
        self.after_step()
        if self.budget is not None:
            self.budget.after_step()
        # GradScaler calls a fused optimizer even when it skips the step; the flag is then on the optimizer.
        self.clock.end_step(getattr(optimizer, "found_inf", None))
        if self.budget is not None and self.updates_on_step:
            step = self.budget.step_to_check()
            if step is not None:
                self.update_strength(step)

    def update_strength(self, step: int) -> None:
        """Let the budget choose, where `step` steps are done and a round ends with them.

        In your own loop it runs after each optimizer step. A loop whose steps run without the host sets
        `updates_on_step` to False and calls this method after every step.
        """
        if self.budget is not None and self.budget.is_due(step):
            check_values(self.model)  # raises where training has diverged
            self.budget.update(step)

    def measures_at(self, step: int) -> bool:
        """Whether :meth:`update_strength` needs the inputs of the last step when `step` steps are done."""
        return self.budget is not None and self.budget.is_due(step)

    def note_inputs(self, *args: Any, **kwargs: Any) -> None:
        """Take the inputs of the last training forward, in a loop that compiles the forward; others are noticed."""
        self.site_masks.note_inputs(args, kwargs)

    @property
    def attached(self) -> bool:
        """Whether an optimizer is attached."""
        return self._optimizer is not None

    def release(self) -> None:
        """Remove the hooks from the attached optimizer; the masks stay."""
        for handle in self._handles:
            handle.remove()
        self._optimizer, self._handles = None, []

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Return optimizer groups: weights and BatchNorm scales decay (2e-4 in the paper), shifts and biases do not."""
        return undecayed_biases(self.model, weight_decay)

    def _warn_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("softprune: %s", message)

    # --- the cut ---------------------------------------------------------------------------------------------------

    def plan(self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True) -> PrunePlan:
        """Return what every module would keep if the network were cut now. Arguments as in :meth:`compact`."""
        return self._plan_cut(model, round_to, gathers)[0]

    def _plan_cut(
        self, model: nn.Module | None, round_to: int | None, gathers: bool
    ) -> tuple[PrunePlan, nn.Module, dict[str, Tensor]]:
        """Return the plan of a cut, the network that it starts from, and the masks."""
        network = self._network_of(model)
        check_values(network)
        if round_to is not None:
            check_round_to(round_to)
        network, masks = self._fold_gates(network), self.masks(model)
        multiple = self.round_to if round_to is None else int(round_to)
        return make_plan(self.graph, network, masks, round_to=multiple, gathers=gathers), network, masks

    def summary(self) -> Summary:
        """Return width and kept channels per site, and the totals before and after. Prints as a table."""
        plan, _, masks = self._plan_cut(None, None, gathers=True)
        dead = self.site_masks.by_site(self.site_masks.dead())
        rows = tuple(
            SiteSummary(
                name=site.name,
                width=site.width,
                kept=int(masks[site.name].sum()),
                floor=self.floors[site.name],
                rounded=int((masks[site.name] & dead[site.name]).sum()),
                left=0 if plan.goes(site.name) else len(plan.modules[site.name].outputs),
            )
            for site in self.sites
        )
        return Summary(
            sites=rows,
            channels=sum(row.kept for row in rows),
            dense_channels=sum(row.width for row in rows),
            macs=plan.macs,
            dense_macs=plan.dense_macs,
            params=plan.params,
            dense_params=plan.dense_params,
            filled=plan.kept_for_shape,
        )

    @torch.inference_mode(False)
    def compact(
        self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True
    ) -> nn.Module:
        """Return a new module of the same class without the dead channels, verified equal to the masked model.

        The model itself is not changed. A VerificationError is raised, and there is no result, if the cut would not
        be exact. The arguments change how much is removed, never what is computed.

        Args:
            model: A copy of the trained network, an EMA for example, whose weights are cut instead.
            round_to: Fill convolution outputs, and what BatchNorms read of a stream, up to this multiple with zero
                channels; None: the pruner's own. Parts of a split and dead branches are not filled.
            gathers: Whether layers may read a part of a shared stream (a residual sum, a concatenation) through an
                index. False reads the whole stream: fewer, larger operations, which small batches may prefer.
        """
        if not any(is_masked(module) for module in self._network_of(model).modules()):
            logger.warning(
                "softprune: `model` is a copy without masks, so evaluating it has not shown what is cut: evaluate the "
                "compact network, or copy the network (for an EMA) after the pruner is made"
            )
        plan, network, masks = self._plan_cut(model, round_to, gathers)
        if self._limit is not None:
            self._limit.check_met(plan, masks)
        compact, self.certificate = cut_and_verify(plan, network, masks, self.example)
        logger.info("%s", self.certificate)
        self._warn_of_cut(plan, masks, dead=bool(self.site_masks.dead(network).any()))
        return compact

    def _warn_of_cut(self, plan: PrunePlan, masks: dict[str, Tensor], *, dead: bool) -> None:
        """Say what is odd about a cut; `dead`: whether any channel is."""
        for name in sorted(self.required):
            count = int(masks[name].sum())
            if count >= NARROW * len(masks[name]):
                continue
            logger.warning(
                "softprune: '%s' keeps %d of %d channels, and every path to an output passes it: the network may have "
                "lost what it knew. Set `min_channels`, exclude the site, lower the strength or relax the target",
                name,
                count,
                len(masks[name]),
            )
        if self.certificate is not None and not self.certificate.varies:
            logger.warning(
                "softprune: the network gives the same outputs for every input: lower the learning rate, or %s",
                "the strength" if self.penalised and not self.has_target else "prune less",
            )
        if plan.macs == plan.dense_macs and plan.params >= plan.dense_params:
            kept = f"round_to={self.round_to}, min_channels={self.min_channels} or streams that are read whole"
            why = f"channels are dead, but {kept} keep them" if dead else "no channel is dead; train longer"
            logger.warning("softprune: the compact network is as large as the dense one: %s", why)

    def _check_in_place(self) -> None:
        """Raise a ModelError unless the masked BatchNorms are still part of the model."""
        if self._detached:
            raise ModelError("a pruner cannot be used after detach(). Got a call after it; make a new pruner.")
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name, bn in self.site_masks.members.items():
            if modules.get(name) is not bn:
                raise ModelError(
                    f"the sites of a pruner must stay in place. '{name}' is no longer the BatchNorm that was masked; "
                    "convert modules (convert_sync_batchnorm, fusing, wrapping) before making the pruner, or detach() "
                    "first."
                )

    def _network_of(self, model: nn.Module | None) -> nn.Module:
        """Return the pruned network, or the copy of it inside DDP, EMA or compile wrappers, with the same layers."""
        network = self.model if model is None else model
        while type(network) is not type(self.model):
            inner = getattr(network, "module", None) or getattr(network, "_orig_mod", None)
            if not isinstance(inner, nn.Module):
                raise ModelError(
                    f"`model` must be a copy of the network that is being pruned, a {type(self.model).__name__}. "
                    f"Got a {type(model).__name__}."
                )
            network = inner
        shapes = _shapes(network)
        for name in (*self._shapes, *shapes):
            if self._shapes.get(name) != shapes.get(name):
                raise ModelError(
                    "`model` must be a copy of the network that is being pruned, whose layers are replaced (a "
                    "classifier, for example) or made by a first forward pass before the pruner is made. The parameter "
                    f"'{name}' was {self._shapes.get(name)}; got {shapes.get(name)}."
                )
        return network

    # --- the end of the pruner, and its state ---------------------------------------------------------------------

    def detach(self) -> nn.Module:
        """Return the plain model with its weights as they are now. The pruner can no longer be used."""
        self.release()
        unmask_model_(self.model)
        self._detached, self._checked = True, False
        return self.model

    def __deepcopy__(self, memo: dict[int, Any]) -> Pruner:
        # A copy of what holds the pruner, an EMA of a LightningModule or a module with a hook of it, keeps this pruner.
        if not memo:
            self.__reduce__()
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a pruner cannot be pickled or copied: it belongs to one model and one optimizer. Save "
            "pruner.state_dict() and load it into a new pruner, or save pruner.compact()."
        )

    def _made_with(self) -> dict[str, Any]:
        """Return the part of the state that must be the same in the pruner that resumes from it."""
        settings = {"strength": self._given_strength, "target": None if self.target is None else str(self.target)}
        return {
            "method": self.name,
            "sites": [site.name for site in self.sites],
            "round_to": self.round_to,
            "min_channels": self.min_channels,
            "keep": {name: share for name, share in self.keep.items() if share},
            "most": {name: share for name, share in self.most.items() if share < 1},
            "settings": settings | {name: getattr(self, name) for name in self.settings},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume exactly, beside the model's and the optimizer's own state."""
        return {
            **self._made_with(),
            "clock": self.clock.state_dict(),
            "strength": float(self.strength),
            "begun": self._begun,
            "decision": self.site_masks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict`."""
        if not isinstance(state, dict) or not {"clock", "strength", "begun", "decision"} <= state.keys():
            got = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise CheckpointError(
                f"a pruner's state must be what state_dict() returned. Got {got}; pass that part of the checkpoint."
            )
        check_strength(state["strength"])
        made = self._made_with()
        ours, theirs = ({**each, **each.get("settings", {})} for each in (made, state))
        for name, here in ours.items():
            if name != "settings" and (theirs.get(name) or None) != (here or None):
                later = ", or set pruner.strength after loading" if name == "strength" else ""
                raise CheckpointError(
                    "a pruner's state must be of the same method, sites, floors and settings. In this pruner "
                    f"{name!r} is {here!r}; got {theirs.get(name)!r}. Make the pruner as that of the checkpoint was "
                    f"made{later}."
                )
        self.clock.load_state_dict(state["clock"])
        self._set_strength(float(state["strength"]))
        self._begun = bool(state["begun"])
        self.site_masks.load_state_dict(state["decision"])


def undecayed_biases(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of SCP's authors: weights and BatchNorm scales decay, shifts and biases do not."""
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (spared if name.rpartition(".")[2] == "bias" else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# --- what is shown --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteSummary:
    """One masked BatchNorm."""

    name: str
    width: int
    kept: int
    floor: int
    rounded: int = 0
    """Dead kept channels: those that a multiple or a floor keeps."""
    left: int = 0
    """Channels in a cut network: fewer than are kept where they are not read, or a coupled site drops them."""


@dataclass(frozen=True)
class Summary:
    """All sites, and what a cut would leave. Prints as a table."""

    sites: tuple[SiteSummary, ...]
    channels: int
    dense_channels: int
    macs: int
    dense_macs: int
    params: int
    dense_params: int
    filled: tuple[str, ...]
    """Modules that keep one channel that is not read, because a shape needs it."""

    def __str__(self) -> str:
        name = max(4, *(len(site.name) for site in self.sites))
        lines = [f"{'site':<{name}}  width  kept"]
        for site in self.sites:
            remark = "  at its floor" if 0 < site.floor == site.kept < site.width else ""
            remark += f"  {site.rounded} dead, kept by rounding or a floor" if site.rounded else ""
            remark += f"  {site.left} left in the cut network" if site.left < site.kept else ""
            lines.append(f"{site.name:<{name}}  {site.width:>5}  {site.kept:>4}{remark}")
        for label, after, before in (
            ("channels", self.channels, self.dense_channels),
            ("MACs", self.macs, self.dense_macs),
            ("parameters", self.params, self.dense_params),
        ):
            lines.append(f"{label}: {after:,} of {before:,} ({100 * (1 - after / max(before, 1)):.1f}% cut)")
        if self.filled:
            lines.append(f"kept one channel that a shape needs: {', '.join(self.filled)}")
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook shows


# --- what is checked ------------------------------------------------------------------------------------------------


def check_values(model: nn.Module) -> None:
    """Raise unless it is a network whose every parameter has finite values."""
    check_is_module(model)
    missing = first_uninitialised(model)
    if missing is not None:
        name, kind = missing
        raise ModelError(
            f"parameters must have values. Got '{name}', a {kind} one; run the model once, or load its weights, "
            "before the pruner is made."
        )
    bad = non_finite(model)
    if bad:
        raise ModelError(
            f"parameters and statistics must be finite. Got NaN or infinity in '{bad[0]}'; go back to a checkpoint "
            "from before training diverged."
        )
