"""The base class of all pruning methods: the training loop's side, the decision and the state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from softprune.budget import Budget, BudgetStatus, Limit
from softprune.costs import fastest_multiple, fitting_multiple
from softprune.cut import coupled_sites, required_sites
from softprune.cut.selection import read_graph
from softprune.distributed import computed_by_rank0
from softprune.errors import ConfigError, first_few
from softprune.graph import ChannelGraph, ExampleLike, Site
from softprune.log import get_logger
from softprune.masks import Chain, Clock, Gate, draw_chain
from softprune.masks.gates import check_rounding
from softprune.methods.cutting import CuttableModel
from softprune.methods.masked_model import MaskedModel
from softprune.methods.optimizer_hooks import OptimizerHooks, check_trains, undecayed_biases, warn_of_decay
from softprune.methods.options import (
    PrunerOptions,
    check_keywords,
    check_loss,
    check_made_alike,
    check_state,
    check_strength,
    check_values,
    nothing_to_prune,
)
from softprune.target import Target

logger = get_logger(__name__)

GraphReader = Callable[..., ChannelGraph]
"""`softprune.cut.selection.read_graph` for the model, its example and the user's choice of sites."""


class Pruner(CuttableModel):
    """A pruning method applied to a model. Subclasses define the gate of each site and the work around a step.

    The model's BatchNorms are masked in place: same parameters, same state_dict keys. Your loop, optimizer,
    scheduler and wrappers stay as they are.

    Args:
        model: The network; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        strength: Weight of what the method adds to the loss.
        options: See :class:`softprune.methods.options.PrunerOptions`.
    """

    name: ClassVar[str]
    """`method.name` in a recipe; a state to resume from must have the same."""
    description: ClassVar[str]
    """What it does, in a line."""
    continues: ClassVar[bool] = False
    """Whether training may continue after a physical cut: each channel is decided on its own."""
    capturable: ClassVar[bool] = True
    """Whether the work around a step consists of in-place tensor operations, which a CUDA graph can record."""
    shifts_decide: ClassVar[bool] = False
    """Whether the decision depends on BatchNorm shifts, on which weight decay would then act."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes with what the method was given, which a state to resume from must agree with."""
    updates_on_step: bool = True
    """Whether :meth:`update_strength` runs after every optimizer step."""
    _limit: Limit | None = None
    """The target's, where there is one."""

    def __init__(
        self, model: nn.Module, example: ExampleLike, *, strength: float = 0.0, **options: Unpack[PrunerOptions]
    ) -> None:
        check_keywords(type(self), options)
        round_to, min_channels = options.get("round_to", 1), options.get("min_channels", 0)
        check_strength(strength)
        check_rounding(1 if round_to == "auto" else round_to, min_channels)
        check_values(model)
        self.model = model
        include, exclude = options.get("include"), options.get("exclude")
        self.graph = self._read(functools.partial(read_graph, model, example, include=include, exclude=exclude))
        if not self.graph.sites:
            raise nothing_to_prune(model, self.graph, chosen=include is not None or exclude is not None)
        self._check_sites([site.name for site in self.graph.sites])
        if self.graph.unreached:
            logger.warning(
                "softprune: the example does not lead to %s: what only they read may be cut away. "
                "Pass an example that does",
                first_few(self.graph.unreached),
            )
        self.example = self.graph.example
        device = next(model.parameters()).device
        self.required = required_sites(self.graph)
        self.coupled = coupled_sites(self.graph)
        if round_to == "auto":
            widths = [site.width for site in self.graph.sites]
            multiple = computed_by_rank0(lambda: fastest_multiple(device), device)
            round_to = fitting_multiple(multiple, widths, len(self.required))
        self.round_to, self.min_channels = int(round_to), int(min_channels)
        self.certificate = None
        self.clock = Clock(options.get("seed", 0), device)
        self._given_strength = float(strength)
        self._strength = torch.tensor(self._given_strength, device=device)
        self._optimizer_hooks: OptimizerHooks | None = None
        self._begun = False
        self._loss_called = False
        self._said: set[str] = set()
        self._masked_model = MaskedModel(
            model,
            {site: self._gate(number, site) for number, site in enumerate(self.graph.sites)},
            {site.name: self.coupled_to(site.name) for site in self.graph.sites},
            self.clock,
        )
        self.norms = self._masked_model.norms

    # --- what a method defines -----------------------------------------------------------------------------------

    def _read(self, read: GraphReader) -> ChannelGraph:
        """Return the channel graph with the sites that the method masks."""
        return read()

    def _check_sites(self, names: Sequence[str]) -> None:
        """Read the options that are given by site, before any site is masked."""

    def _gate(self, number: int, site: Site) -> Gate:
        raise NotImplementedError

    def _extra_loss(self) -> Tensor | None:
        """Return what the method adds to the task loss; None for nothing."""
        return None

    def _begin(self) -> None:
        """Run once, when a pruner that has not trained yet is attached."""

    def before_step(self) -> None:
        """Run before every optimizer step."""

    def after_step(self) -> None:
        """Run after every optimizer step."""

    def update_strength(self, step: int) -> None:
        """Run on the host between two steps, after `step` steps in all; methods with a target use it.

        In your own loop it runs after each optimizer step. A loop whose steps run without the host sets
        `updates_on_step` to False and calls this method after every step.
        """

    @property
    def status(self) -> BudgetStatus | None:
        """Where the budget is; None without a target. Counts the cost of a cut now, so call it once per epoch."""
        return None if self._limit is None else self._limit.status(self.masks(), float(self.strength))

    def metrics(self) -> dict[str, float]:
        """Return what to log once per epoch: the strength, what share of the channels stays, and of the target."""
        kept, status = sum(int(mask.sum()) for mask in self.masks().values()), self.status
        found = {"channels_kept": kept / sum(site.width for site in self.sites), "strength": float(self.strength)}
        if status is not None:
            found |= {f"{status.target}_kept": status.cost / status.dense, "margin": status.margin}
        return found

    def end_epoch(self, epoch: int) -> None:
        """Call after every epoch; most methods do nothing there."""

    @property
    def decided(self) -> bool:
        """Whether evaluation uses the masks. Methods that decide once, after training, do so in :meth:`decide`."""
        return True

    def decide(self) -> dict[str, Tensor]:
        """Finalise the decision, where the method takes it once after training, and return the masks in force."""
        return self.masks()

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
        if isinstance(self._limit, Budget):
            raise ConfigError(
                "a target adjusts the strength itself. "
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

    @target.setter
    def target(self, value: object) -> None:
        raise ConfigError(
            f"the target of a pruner is set when it is made. Got {value!r} for a pruner that exists; make a new one "
            "from what pruner.detach() or pruner.compact() returns."
        )

    @property
    def penalty(self) -> Tensor:
        """What the method adds to the task loss at the current weights, without a gradient: for logging."""
        with torch.no_grad():
            extra = self._extra_loss()
        return torch.zeros((), device=self.clock.step.device) if extra is None else extra.detach()

    def draw_ahead(self, chain: Chain = draw_chain) -> None:
        """Draw the masks of the next training forward now instead of at its beginning.

        For loops that compile the whole forward: it compiles and runs faster when the masks are inputs. `chain` is
        :func:`softprune.masks.draw_chain` or its compiled form. The masks are the same.
        """
        self._masked_model.hooks.draw_ahead(chain)

    def loss(self, task: Tensor) -> Tensor:
        """Return the task loss plus what the method adds. Under eval() or no_grad the task loss is unchanged."""
        check_loss(task)
        if not self.model.training or not torch.is_grad_enabled():
            return task
        if not torch.compiler.is_compiling():
            self._masked_model.check_in_place()
        if self._loss_called and self._optimizer_hooks is None and self.updates_on_step:
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
        if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise ConfigError(
                f"a pruner is attached to a torch.optim.Optimizer. Got {type(optimizer).__name__}; attach the one that "
                "steps the weights (of a wrapper, the optimizer inside)."
            )
        self._masked_model.check_in_place()
        if self._optimizer_hooks is not None:
            if self._optimizer_hooks.optimizer is optimizer:
                return  # a cell of a notebook that is run again
            raise ConfigError(
                "a pruner is attached to one optimizer. Got a second one; attach the optimizer that steps the "
                "BatchNorms, once, or release() the first one before."
            )
        check_trains(optimizer, self.norms)
        if self.shifts_decide:
            warn_of_decay(optimizer, self.norms)
        shift = next(iter(self.norms.values())).bias
        if shift.is_inference() or self.clock.step.is_inference():
            raise ConfigError(
                "network and pruner must be made outside of torch.inference_mode() to be trained. Got "
                f"{'a network' if shift.is_inference() else 'a pruner'} made inside; make it again outside."
            )
        self._optimizer_hooks = OptimizerHooks(optimizer, shift, self.before_step, self._after_optimizer_step)
        if not self._begun:
            self._begin()
            self._begun = True

    @property
    def attached(self) -> bool:
        """Whether an optimizer is attached."""
        return self._optimizer_hooks is not None

    def release(self) -> None:
        """Detach from the optimizer: its steps no longer count, and another one may be attached."""
        if self._optimizer_hooks is not None:
            self._optimizer_hooks.remove()
            self._optimizer_hooks = None

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Return optimizer groups: weights and BatchNorm scales decay (2e-4 in the paper), shifts and biases do not."""
        return undecayed_biases(self.model, weight_decay)

    def _after_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.penalised and self.updates_on_step and not self._loss_called:
            self._warn_once(
                "an optimizer step ran without pruner.loss(...), so nothing was added to the task loss: call "
                "loss = pruner.loss(task_loss) before loss.backward(), with the model in training mode"
            )
        self._loss_called = False
        # GradScaler calls a fused optimizer even when it skips the step; the flag is then on the optimizer.
        skipped = getattr(optimizer, "found_inf", None)
        self.after_step()
        if skipped is None:
            self.clock.end_step()
        else:
            self.clock.end_step_unless(skipped)

    def _warn_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("softprune: %s", message)

    # --- the end of the pruner, and its state ---------------------------------------------------------------------

    def detach(self) -> nn.Module:
        """Return the plain model with its weights as they are now. The pruner can no longer be used."""
        self.release()
        return self._masked_model.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pruner":
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
            "settings": settings | {name: getattr(self, name) for name in self.settings},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume exactly, beside the model's and the optimizer's own state."""
        return {
            **self._made_with(),
            "clock": self.clock.state_dict(),
            "strength": float(self.strength),
            "begun": self._begun,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict`."""
        check_state(state, {"clock", "strength", "begun"})
        check_state(state["clock"], set())
        check_strength(state["strength"])
        check_made_alike(self._made_with(), state)
        self.clock.load_state_dict(state["clock"])
        self._set_strength(float(state["strength"]))
        self._begun = bool(state["begun"])
