"""A callback for transformers' Trainer: joint training and pruning, without a change to the model's forward."""

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
"""Steps between two counts of what is logged."""


class SoftPruningCallback(TrainerCallback):  # type: ignore[misc]
    """Prunes the network of a transformers Trainer while it trains.

    Pass it to the Trainer and call :meth:`bind` before ``trainer.train()`` (docs/integrations.md). It makes the pruner,
    gives the Trainer an optimizer whose weight decay spares BatchNorm shifts, and adds the method's loss to the
    Trainer's. The pruner's state is in every checkpoint, and ``trainer.train(resume_from_checkpoint=...)`` loads it.

    Args:
        example: What the network is called with: a tensor, a tuple of arguments, or (args, kwargs).
        network: Name of the model's submodule to prune; empty for the model itself.
        make: Makes the pruner from (network, example, **options); any class of `softprune.methods`.
        options: The pruner's own: `strength=`, `target=`, `round_to=` ... A target's `total_steps` is the Trainer's
            number of optimizer steps where it is not given.
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
        """Make the pruner for the Trainer's model, and add the method's loss to the Trainer's."""
        if trainer.model_init is not None:
            raise ConfigError(
                "the callback prunes the network that the Trainer has now. Got a Trainer with `model_init`, which "
                "makes another one when training starts; pass model=model_init() instead."
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
            self._resumed = resume_from_checkpoint  # may lie outside of output_dir
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.compute_loss, trainer.train = with_pruning, with_state
        if trainer.optimizer is None:
            decay = trainer.args.weight_decay
            kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
            groups = _parameter_groups(trainer.model, model, self.pruner, decay)
            trainer.optimizer = kind(groups, **settings)

    # --- what the Trainer calls ------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.pruner is None:
            raise ConfigError(
                "the callback must know its Trainer. Got none; call pruning.bind(trainer) before train()."
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
            if state.global_step >= min(self._next_metrics, state.max_steps):  # they count the cost of a cut
                self._metrics = {f"softprune_{name}": value for name, value in self.pruner.metrics().items()}
                self._next_metrics = state.global_step + _METRICS_EVERY
            logs.update(self._metrics)
            if state.log_history:  # written before callbacks are called
                state.log_history[-1].update(self._metrics)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.pruner is not None and state.is_world_process_zero and folder.is_dir():
            torch.save(self.pruner.state_dict(), folder / STATE_FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.pruner is not None:
            self.pruner.release()
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                self._load(Path(state.best_model_checkpoint))  # the Trainer has loaded its weights

    def _load(self, checkpoint: Path) -> None:
        """Load the pruner's state of a checkpoint."""
        assert self.pruner is not None
        self.pruner.load_state_dict(torch.load(checkpoint / STATE_FILE, weights_only=True))

    # --- what you call -------------------------------------------------------------------------------------------

    def compact(self, model: nn.Module | None = None, **options: Any) -> nn.Module:
        """Return the compact network, verified equal; arguments as in the pruner's own `compact`.

        It computes in the precision of its weights, without the autocast that `bf16=True` or `fp16=True` adds.
        """
        if self.pruner is None:
            raise ConfigError(
                "`compact` needs a trained network. Got none; call pruning.bind(trainer) and train first."
            )
        self.pruner.decide()
        return extract_model_from_parallel(self.pruner.compact(model, **options), keep_fp32_wrapper=False)


def _parts(trainer: Trainer, items: Any) -> int:
    """Return by how many micro-batches what is added to their losses must be divided, since the Trainer does not.

    It sums losses that were divided by `items`, the number of labels in the whole batch; of others it takes the mean.
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
    """Return the pruner's groups, and the parameters of the rest of the model as one group."""
    groups = pruner.parameter_groups(weight_decay=decay)
    inside = {id(parameter) for parameter in network.parameters()}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    return [*groups, {"params": rest, "weight_decay": decay}] if rest else groups
