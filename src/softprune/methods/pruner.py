"""The base class of pruning methods: masks a model, and provides the interface for training, cutting and resuming.

A method is a subclass that defines the masks (:meth:`Pruner._make_masks`), an optional penalty, and the work before and
after each optimizer step.
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
"""A warning is logged if a site on all paths to an output keeps less than this share of its channels."""


class Pruner(HookOwner):
    """Base class of pruning methods, applied to a model.

    The BatchNorms of the model are masked in place; parameters and state_dict keys do not change. Training loop,
    optimizer, scheduler and wrappers can stay the same. All methods accept the keyword arguments in
    :class:`softprune.methods.options.PrunerOptions`.

    Training: :meth:`parameter_groups`, :meth:`attach`, :meth:`loss`, :meth:`end_epoch`; for logging, :meth:`metrics`,
    :attr:`status` and :attr:`penalty`. Decision: :meth:`masks`, :meth:`summary`, :meth:`decide`. Cut: :meth:`plan`,
    :meth:`compact`. Resume: :meth:`state_dict`, :meth:`load_state_dict`. Clean-up: :meth:`release`, :meth:`detach`.

    Args:
        model: The network, masked in place.
        example: An input of the model: a tensor, a tuple of arguments, or (args, kwargs).
        strength: Sparsity strength, the factor of the penalty that the method adds to the loss.
    """

    name: ClassVar[str]
    """`method.name` in a recipe. A state can only be loaded into a pruner with the same name."""
    description: ClassVar[str]
    """One-line description."""
    continues: ClassVar[bool] = False
    """Whether training can continue after a cut, since channels are decided independently."""
    capturable: ClassVar[bool] = True
    """Whether the work around a step is in-place tensor operations only, which a CUDA graph can capture."""
    penalised: ClassVar[bool] = False
    """Whether the method adds ``strength`` times a penalty to the loss."""
    shifts_decide: ClassVar[bool] = False
    """Whether the masks depend on BatchNorm shifts, which should then have no weight decay."""
    site_kinds: Iterable[str] = ()
    """Kinds of sites to mask in addition to BatchNorms followed by an activation: "sum", "linear", "stream"."""
    every_norm: bool = False
    """Whether to mask BatchNorms without a following activation too, such as the last one of a residual branch."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that must be equal in a state to resume from."""
    updates_on_step: bool = True
    """Whether :meth:`update_strength` runs after every optimizer step."""
    certificate: Certificate | None = None
    """Result of the verification in the last :meth:`compact`."""
    site_masks: Masks
    """The masks of all sites."""
    norms: dict[str, Any]
    """The masked BatchNorm of each site, by name; the first one if there are several."""
    has_target: bool = False
    """Whether a target determines how much is removed."""
    budget: Budget | None = None
    """Chooses channels during training, for SCP with a target."""
    _limit: Limit | None = None
    """The limit of the target, if there is one."""

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
                "softprune: the forward pass on the example does not use %s, so channels that only these read may be "
                "removed. Pass an example that uses them",
                first_few(self.graph.unreached),
            )
        self.example = self.graph.example
        device = next(model.parameters()).device
        self.required = required_sites(self.graph)
        """Sites that must keep a channel, since they are on every path to an output."""
        self.coupled = coupled_sites(self.graph)
        """Groups of coupled sites; a channel is kept only if all sites of its group keep it."""
        if round_to is None or round_to == "auto":
            round_to = self._multiple(device if round_to == "auto" else None)
        check_round_to(round_to)
        self.round_to, self.min_channels = int(round_to), int(min_channels)
        self.keep, self.most = limits_by_site(keep, self.sites)
        if min(self.most.values()) < 1 and not self.has_target:
            raise ConfigError(f"A maximum in `keep` needs a target. Got {keep!r}; pass `target`.")
        self.floors = self._floors()
        """Minimum number of channels that each site keeps, by name."""
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
        """Return a multiple of channels that is fast on `device`; for None, the default multiple."""
        widths, required = [site.width for site in self.sites], len(self.required)
        if device is not None:
            multiple = fitting_multiple(default_multiple(device), widths, required)
        else:  # WIDTH_MULTIPLE if most sites have at least four times as many channels
            wide = self.has_target and fitting_multiple(2 * WIDTH_MULTIPLE, widths, required) == 2 * WIDTH_MULTIPLE
            multiple = WIDTH_MULTIPLE if wide else 1
        if multiple > 1:
            logger.info("softprune: sites keep multiples of %d channels; round_to=1 allows any number", multiple)
        return multiple

    # --- defined by methods --------------------------------------------------------------------------------------

    def _read(self, example: ExampleLike, **globs: Globs) -> ChannelGraph:
        """Return the channel graph with the sites to mask. `globs` are the options `include` and `exclude`."""
        return read_graph(self.model, example, kinds=self.site_kinds, every_norm=self.every_norm, **globs)

    def _make_masks(self) -> Masks:
        """Mask the sites of `self.model` in place and return the masks."""
        return StoredMasks(self.model, self.sites, self.clock, **self._rules())

    def _extra_loss(self) -> Tensor | None:
        """Return the penalty that the method adds to the task loss; None for no penalty."""
        return None

    def _begin(self) -> None:
        """Called once, when an optimizer is attached before training starts."""

    def before_step(self) -> None:
        """Called before every optimizer step."""

    def after_step(self) -> None:
        """Called after every optimizer step."""

    def end_epoch(self, epoch: int) -> None:
        """Call this after every epoch. It does nothing for most methods."""

    @property
    def decided(self) -> bool:
        """Whether evaluation uses the masks. False before :meth:`decide` for methods that decide after training."""
        return True

    def decide(self) -> dict[str, Tensor]:
        """Make the decision final and return the masks."""
        return self.masks()

    def _fold_gates(self, network: nn.Module) -> nn.Module:
        """Return `network`, or a copy whose plain BatchNorms equal the masked ones on kept channels."""
        return network

    # --- the sites -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        channels = sum(site.width for site in self.sites)
        return f"{type(self).__name__}({type(self.model).__name__}, {len(self.sites)} sites, {channels:,} channels)"

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of the network."""
        return self.graph.sites

    def _floors(self) -> dict[str, int]:
        """Return the floor of every site. All sites of a coupled group have the same floor."""
        floors = {}
        for site in self.sites:
            share = math.ceil(self.keep[site.name] * site.width - 1e-9)
            floors[site.name] = min(max(self.min_channels, share, int(site.name in self.required)), site.width)
        for group in self.coupled:
            floors |= dict.fromkeys(group, max(floors[name] for name in group))
        return floors

    def _rules(self) -> dict[str, Any]:
        """Return the constraints on all masks, as keyword arguments of :class:`Masks`."""
        return {"floors": self.floors, "round_to": self.round_to, "coupled": self.coupled}

    def _prunable(self) -> PrunableNetwork:
        """Return the network with the constraints on its cuts, for a budget."""
        coupled = blocks_of_sites(self.graph, self.round_to)
        caps = {site.name: math.floor(self.most[site.name] * site.width + 1e-9) for site in self.sites}
        return PrunableNetwork(self.graph, self.model, self.example, self.floors, coupled, self.round_to, caps)

    def masks(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Return the current hard masks of all sites, True for kept channels. `model`: a copy such as an EMA."""
        self._check_in_place()
        network = None if model is None else self._network_of(model)
        return {name: mask.clone() for name, mask in self.site_masks.by_site(self.site_masks.hard(network)).items()}

    # --- the training loop -----------------------------------------------------------------------------------------

    @property
    def strength(self) -> Tensor:
        """The factor of the penalty: a scalar tensor on the device, which may change during training."""
        device = self.clock.step.device
        if self._strength.device != device:
            self._strength = self._strength.to(device)
        return self._strength

    @strength.setter
    def strength(self, value: float | Tensor) -> None:
        check_strength(value)
        if self.budget is not None:
            raise ConfigError(
                "with a target there is no sparsity loss, so its strength cannot be set. "
                f"Got strength = {float(value):g}; set it only without a target."
            )
        self._set_strength(value)

    def _set_strength(self, value: float | Tensor) -> None:
        # In place, so that a captured CUDA graph reads the new value.
        self.strength.copy_(torch.as_tensor(value))

    @property
    def target(self) -> Target | None:
        """The target given to the pruner; None without a target."""
        return None if self._limit is None else self._limit.target

    @property
    def status(self) -> BudgetStatus | None:
        """Progress towards the target; None without a target. It plans a cut, so do not call it in every step."""
        return None if self._limit is None else self._limit.status(self.masks())

    def metrics(self) -> dict[str, float]:
        """Return metrics to log once per epoch: strength, share of kept channels and, with a target, its progress."""
        kept, status = sum(int(mask.sum()) for mask in self.masks().values()), self.status
        found = {"channels_kept": kept / sum(site.width for site in self.sites), "strength": float(self.strength)}
        if status is not None:
            found |= {f"{status.target}_kept": status.cost / status.dense, "margin": status.margin}
        return found

    @property
    def penalty(self) -> Tensor:
        """The penalty at the current weights, without a gradient, for logging."""
        with torch.no_grad():
            extra = self._extra_loss()
        return torch.zeros((), device=self.clock.step.device) if extra is None else extra.detach()

    def loss(self, task: Tensor) -> Tensor:
        """Return the task loss plus the penalty. In eval mode or under no_grad, return the task loss unchanged."""
        if not isinstance(task, Tensor):
            raise ConfigError(f"`task` must be the loss as a tensor. Got {type(task).__name__}; omit .item().")
        if not self.model.training or not torch.is_grad_enabled():
            return task
        if not self._checked and not torch.compiler.is_compiling():
            self._check_in_place()
            self._network_of(None)  # here, since a forward pass may make layers
            self._checked = True
        if self._loss_called and self._optimizer is None and self.updates_on_step:
            self._warn_once(
                "no optimizer is attached, so no steps are counted: call pruner.attach(optimizer) before the first step"
            )
        self._loss_called = True
        return self._total_loss(task)

    def _total_loss(self, task: Tensor) -> Tensor:
        """Return the sum of the task loss and the penalty."""
        extra = self._extra_loss()
        return task if extra is None else task + extra.to(task.device)

    def attach(self, optimizer: Optimizer) -> None:
        """Register hooks on the optimizer that count its steps and run the method's work before and after each."""
        self._check_in_place()
        if self._optimizer is optimizer:
            return  # such as a notebook cell that is run again
        if self._optimizer is not None:
            raise ConfigError(
                "a pruner can be attached to one optimizer. Got a second one; attach only the optimizer of the "
                "BatchNorms, or call release() first."
            )
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, bn in self.norms.items() if not {id(bn.bias), id(bn.weight)} <= owned]
        if missing:
            raise ConfigError(
                "the attached optimizer must train scale and shift of every site. Got one without those of "
                f"{first_few([*map(repr, missing)])}; create it from pruner.parameter_groups(), and set "
                "requires_grad=False on parameters to freeze before creating the pruner."
            )
        groups = [group for group in optimizer.param_groups if float(group.get("weight_decay", 0) or 0) != 0]
        decayed = {id(parameter) for group in groups for parameter in group["params"]}
        names = [name for name, bn in self.norms.items() if self.shifts_decide and id(bn.bias) in decayed]
        if names:
            logger.warning(
                "softprune: weight decay acts on the shifts of %d masked BatchNorms (%s), which keeps channels from "
                "dying and changes the method; use pruner.parameter_groups(weight_decay=...)",
                len(names),
                first_few(names),
            )
        self._optimizer = optimizer
        # In a compiled step, Dynamo would take minutes to trace the host code in these hooks.
        before, after = (torch.compiler.disable(hook) for hook in (self._before_step, self._after_step))
        before.network = after.network = self.model  # by which softprune.remap_optimizer finds and removes them
        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        if not self._begun:
            self._begin()
            self._begun = True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Run the work before a step; if a closure computes the gradients, run it after each call of the closure."""

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
        # GradScaler calls a fused optimizer even if it skips the step, with a flag on the optimizer.
        self.clock.end_step(getattr(optimizer, "found_inf", None))
        if self.budget is not None and self.updates_on_step:
            step = self.budget.step_to_check()
            if step is not None:
                self.update_strength(step)

    def update_strength(self, step: int) -> None:
        """Run the round of the budget that is due after `step` steps, if any.

        By default it is called after each optimizer step. A loop whose steps run without the host must set
        `updates_on_step` to False and call this method after every step.
        """
        if self.budget is not None and self.budget.is_due(step):
            check_values(self.model)  # raises if training has diverged
            self.budget.update(step)

    def measures_at(self, step: int) -> bool:
        """Return whether :meth:`update_strength` needs the inputs of the last step after `step` steps."""
        return self.budget is not None and self.budget.is_due(step)

    def note_inputs(self, *args: Any, **kwargs: Any) -> None:
        """Record the inputs of the last training forward pass. Needed only in loops that compile the forward pass."""
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
        """Return optimizer groups with weight decay (2e-4 in the paper) for all parameters except shifts and biases."""
        return undecayed_biases(self.model, weight_decay)

    def _warn_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("softprune: %s", message)

    # --- the cut ---------------------------------------------------------------------------------------------------

    def plan(self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True) -> PrunePlan:
        """Return the plan of a cut at the current state. Arguments as in :meth:`compact`."""
        return self._plan_cut(model, round_to, gathers)[0]

    def _plan_cut(
        self, model: nn.Module | None, round_to: int | None, gathers: bool
    ) -> tuple[PrunePlan, nn.Module, dict[str, Tensor]]:
        """Return the plan of a cut, the network to cut, and the masks."""
        network = self._network_of(model)
        check_values(network)
        if round_to is not None:
            check_round_to(round_to)
        network, masks = self._fold_gates(network), self.masks(model)
        multiple = self.round_to if round_to is None else int(round_to)
        return make_plan(self.graph, network, masks, round_to=multiple, gathers=gathers), network, masks

    def summary(self) -> Summary:
        """Return width and kept channels per site, and total costs before and after a cut. Prints as a table."""
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
        """Return a compact network of the same class without the dead channels, verified against the masked model.

        The model is not changed. Raise a VerificationError if the cut is not exact. `round_to` and `gathers` change how
        much is removed, but not the outputs.

        Args:
            model: A copy of the trained network to cut instead, such as an EMA.
            round_to: Fill the outputs of convolutions, and the inputs of BatchNorms from a shared tensor, with zero
                channels up to this multiple. Default: that of the pruner. Pieces and dead branches are not filled.
            gathers: Whether layers may gather channels of a shared tensor (a residual sum, a concatenation). If False,
                they read all of it, which takes fewer, larger operations and can be faster for small batches.
        """
        if not any(is_masked(module) for module in self._network_of(model).modules()):
            logger.warning(
                "softprune: `model` is a copy without masks, so its accuracy is not that of the compact network: "
                "evaluate the compact network, or create copies such as an EMA after the pruner"
            )
        plan, network, masks = self._plan_cut(model, round_to, gathers)
        if self._limit is not None:
            self._limit.check_met(plan, masks)
        compact, self.certificate = cut_and_verify(plan, network, masks, self.example)
        logger.info("%s", self.certificate)
        self._warn_of_cut(plan, masks, dead=bool(self.site_masks.dead(network).any()))
        return compact

    def _warn_of_cut(self, plan: PrunePlan, masks: dict[str, Tensor], *, dead: bool) -> None:
        """Warn about unusual cuts. `dead`: whether any channel is dead."""
        for name in sorted(self.required):
            count = int(masks[name].sum())
            if count >= NARROW * len(masks[name]):
                continue
            logger.warning(
                "softprune: '%s' keeps %d of %d channels and is on every path to an output: the accuracy may collapse. "
                "Set `min_channels`, exclude the site, lower the strength or relax the target",
                name,
                count,
                len(masks[name]),
            )
        if self.certificate is not None and not self.certificate.varies:
            logger.warning(
                "softprune: the network has the same outputs for every input: lower the learning rate, or %s",
                "the strength" if self.penalised and not self.has_target else "prune less",
            )
        if plan.macs == plan.dense_macs and plan.params >= plan.dense_params:
            kept = f"round_to={self.round_to}, min_channels={self.min_channels} or tensors that are read as a whole"
            why = f"channels are dead, but {kept} keep them" if dead else "no channel is dead; train longer"
            logger.warning("softprune: the compact network is as large as the dense one: %s", why)

    def _check_in_place(self) -> None:
        """Raise a ModelError unless the masked BatchNorms are still part of the model."""
        if self._detached:
            raise ModelError("a pruner cannot be used after detach(). Got a call after it; create a new pruner.")
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name, bn in self.site_masks.members.items():
            if modules.get(name) is not bn:
                raise ModelError(
                    f"the masked BatchNorms must stay in the model. '{name}' is no longer the one that was masked; "
                    "convert modules (convert_sync_batchnorm, fusing, wrapping) before creating the pruner, or call "
                    "detach() first."
                )

    def _network_of(self, model: nn.Module | None) -> nn.Module:
        """Return the pruned network, or its copy `model` without DDP, EMA or compile wrappers."""
        network = self.model if model is None else model
        while type(network) is not type(self.model):
            inner = getattr(network, "module", None) or getattr(network, "_orig_mod", None)
            if not isinstance(inner, nn.Module):
                raise ModelError(
                    f"`model` must be a copy of the pruned network, a {type(self.model).__name__}. "
                    f"Got a {type(model).__name__}."
                )
            network = inner
        shapes = _shapes(network)
        for name in (*self._shapes, *shapes):
            if self._shapes.get(name) != shapes.get(name):
                raise ModelError(
                    "`model` must be a copy of the pruned network; layers must be replaced (such as a classifier) or "
                    "created by a first forward pass before creating the pruner. The parameter "
                    f"'{name}' was {self._shapes.get(name)}; got {shapes.get(name)}."
                )
        return network

    # --- detaching, and state -------------------------------------------------------------------------------------

    def detach(self) -> nn.Module:
        """Remove the masks; return the plain model with its current weights. The pruner cannot be used afterwards."""
        self.release()
        unmask_model_(self.model)
        self._detached, self._checked = True, False
        return self.model

    def __deepcopy__(self, memo: dict[int, Any]) -> Pruner:
        # Copies of objects that contain the pruner, such as an EMA of a LightningModule, share it.
        if not memo:
            self.__reduce__()
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a pruner cannot be pickled or copied, since it belongs to one model and one optimizer. Save "
            "pruner.state_dict() and load it into a new pruner, or save pruner.compact()."
        )

    def _made_with(self) -> dict[str, Any]:
        """Return the part of the state that must be equal in a pruner that resumes from it."""
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
        """Return the complete state of the pruner. Model and optimizer have their own state."""
        return {
            **self._made_with(),
            "clock": self.clock.state_dict(),
            "strength": float(self.strength),
            "begun": self._begun,
            "decision": self.site_masks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        if not isinstance(state, dict) or not {"clock", "strength", "begun", "decision"} <= state.keys():
            got = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise CheckpointError(
                f"the state of a pruner must be a result of state_dict(). Got {got}; pass that part of the checkpoint."
            )
        check_strength(state["strength"])
        made = self._made_with()
        ours, theirs = ({**each, **each.get("settings", {})} for each in (made, state))
        for name, here in ours.items():
            if name != "settings" and (theirs.get(name) or None) != (here or None):
                later = ", or set pruner.strength after loading" if name == "strength" else ""
                raise CheckpointError(
                    "a state must have the method, sites, floors and settings of the pruner. In this pruner "
                    f"{name!r} is {here!r}; got {theirs.get(name)!r}. Create the pruner like that of the "
                    f"checkpoint{later}."
                )
        self.clock.load_state_dict(state["clock"])
        self._set_strength(float(state["strength"]))
        self._begun = bool(state["begun"])
        self.site_masks.load_state_dict(state["decision"])


def undecayed_biases(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of SCP's authors: weight decay for all parameters except shifts and biases."""
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
    """Numbers of channels of a site."""

    name: str
    width: int
    kept: int
    floor: int
    rounded: int = 0
    """Number of dead channels that are kept by a multiple or a floor."""
    left: int = 0
    """Number of channels in the compact network: less than `kept` if some are unread or dropped by a coupled site."""


@dataclass(frozen=True)
class Summary:
    """All sites, and the costs before and after a cut. Prints as a table."""

    sites: tuple[SiteSummary, ...]
    channels: int
    dense_channels: int
    macs: int
    dense_macs: int
    params: int
    dense_params: int
    filled: tuple[str, ...]
    """Modules that keep one unread channel because of shapes."""

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
    """Raise a ModelError unless `model` is a network whose parameters and statistics are finite."""
    check_is_module(model)
    missing = first_uninitialised(model)
    if missing is not None:
        name, kind = missing
        raise ModelError(
            f"parameters must have values. Got '{name}', a {kind} one; run the model once, or load its weights, "
            "before creating the pruner."
        )
    bad = non_finite(model)
    if bad:
        raise ModelError(
            f"parameters and statistics must be finite. Got NaN or infinity in '{bad[0]}'; return to a checkpoint "
            "from before the training diverged."
        )
