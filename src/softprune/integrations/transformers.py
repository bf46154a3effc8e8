"""A callback for transformers' Trainer for joint training and pruning, without changes to the model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.graph import ExampleLike
from softprune.methods import Pruner, SoftPruner

try:
    from accelerate.utils import extract_model_from_parallel
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "softprune.integrations.transformers needs transformers; pip install transformers accelerate."
    ) from error

STATE_FILE = "softprune.pt"
_METRICS_EVERY = 100
"""Steps between updates of the logged metrics, since they need the cost of a cut."""


class SoftPruningCallback(TrainerCallback):  # type: ignore[misc]
    """Prunes the network of a transformers Trainer during training.

    Pass it to the Trainer and call :meth:`bind` before ``trainer.train()`` (docs/integrations.md). It creates the
    pruner, adds the method's loss to that of the Trainer, and sets an optimizer that does not decay BatchNorm shifts.
    Checkpoints contain the state of the pruner, and ``trainer.train(resume_from_checkpoint=...)`` restores it.

    Args:
        example: An input of the network: a tensor, a tuple of arguments, or (args, kwargs).
        network: Name of the submodule of the model to prune; empty for the model itself.
        make: Pruner class of `softprune.methods`, or any function of (network, example, **options) that returns one.
        options: Keyword arguments of the pruner, such as `strength=`, `target=` or `round_to=`. For a target,
            `total_steps` is by default the Trainer's number of optimizer steps.
    """

    def __init__(
        self, example: ExampleLike, *, network: str = "", make: Callable[..., Pruner] = SoftPruner, **options: Any
    ) -> None:
        self.example, self.network, self.make, self.options = example, network, make, options
        self.pruner: Pruner | None = None
        self._resumed: Any = None
        self._metrics: dict[str, float] = {}
        self._next_metrics = 0

    def bind(self, trainer: Trainer) -> None:
        """Create the pruner for the Trainer's model, and add the method's loss to that of the Trainer."""
        if trainer.model_init is not None:
            raise ConfigError(
                "the callback prunes the Trainer's current network. Got a Trainer with `model_init`, which creates "
                "another network when training starts; pass model=model_init() instead."
            )
        options = dict(self.options)
        if options.get("target") is not None and "total_steps" not in options:
            options["total_steps"] = _total_steps(trainer)
        model = trainer.model.get_submodule(self.network)
        self.pruner = self.make(model, self.example, **options)
        compute_loss, train = trainer.compute_loss, trainer.train

        def with_pruning(
            model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Tensor | tuple[Tensor, Any]:
            loss, outputs = compute_loss(model, inputs, return_outputs=True, **kwargs)
            assert self.pruner is not None
            parts = _parts(trainer, kwargs.get("num_items_in_batch"))
            loss = self.pruner.loss(loss * parts) / parts
            return (loss, outputs) if return_outputs else loss

        def with_state(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resumed = resume_from_checkpoint  # may be outside output_dir
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.compute_loss, trainer.train = with_pruning, with_state
        if trainer.optimizer is None:
            decay = trainer.args.weight_decay
            kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
            groups = _parameter_groups(trainer.model, model, self.pruner, decay)
            trainer.optimizer = kind(groups, **settings)

    # --- called by the Trainer -------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.pruner is None:
            raise ConfigError(
                "the callback must be bound to its Trainer. Got none; call pruning.bind(trainer) before train()."
            )
        if state.global_step:
            newest = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._load(newest if isinstance(self._resumed, bool) else Path(self._resumed))
        optimizer = kwargs["optimizer"]
        self.pruner.attach(getattr(optimizer, "optimizer", optimizer))  # Accelerate wraps it

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.pruner is not None
        self.pruner.end_epoch(round(state.epoch or 0) - 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and self.pruner is not None and "loss" in logs:
            if state.global_step >= min(self._next_metrics, state.max_steps):
                self._metrics = {f"softprune_{name}": value for name, value in self.pruner.metrics().items()}
                self._next_metrics = state.global_step + _METRICS_EVERY
            logs.update(self._metrics)
            if state.log_history:  # the Trainer appends to it before it calls the callbacks
                state.log_history[-1].update(self._metrics)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.pruner is not None and state.is_world_process_zero and folder.is_dir():
            torch.save(self.pruner.state_dict(), folder / STATE_FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.pruner is not None:
            self.pruner.release()
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                self._load(Path(state.best_model_checkpoint))  # the Trainer has already loaded the weights

    def _load(self, checkpoint: Path) -> None:
        """Load the state of the pruner from a checkpoint."""
        assert self.pruner is not None
        self.pruner.load_state_dict(torch.load(checkpoint / STATE_FILE, weights_only=True))

    # --- called by the user --------------------------------------------------------------------------------------

    def compact(self, model: nn.Module | None = None, **options: Any) -> nn.Module:
        """Return the verified compact network. Arguments are those of the pruner's `compact`.

        The network has no autocast from `bf16=True` or `fp16=True`: it computes in the precision of its weights.
        """
        if self.pruner is None:
            raise ConfigError(
                "`compact` needs a trained network. Got none; call pruning.bind(trainer) and train first."
            )
        self.pruner.decide()
        return extract_model_from_parallel(self.pruner.compact(model, **options), keep_fp32_wrapper=False)


def _parts(trainer: Trainer, items: Any) -> int:
    """Return the number of micro-batches by which a term added to the loss of each must be divided.

    The Trainer sums losses that are divided by `items`, the number of labels in the whole batch; others are averaged.
    """
    sums = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return getattr(trainer, "current_gradient_accumulation_steps", 1) if sums and items is not None else 1


def _total_steps(trainer: Trainer) -> int:
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    batches = len(trainer.get_train_dataloader())
    return math.ceil(math.ceil(batches / args.gradient_accumulation_steps) * args.num_train_epochs)


def _parameter_groups(model: nn.Module, network: nn.Module, pruner: Pruner, decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of the pruner, and one group with the other parameters of the model."""
    groups = pruner.parameter_groups(weight_decay=decay)
    inside = {id(parameter) for parameter in network.parameters()}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    return [*groups, {"params": rest, "weight_decay": decay}] if rest else groups
