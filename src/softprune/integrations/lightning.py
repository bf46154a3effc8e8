"""A Lightning callback for joint training and pruning, without changes to training_step."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.graph import ExampleLike
from softprune.methods import Pruner, SoftPruner

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("softprune.integrations.lightning needs Lightning; pip install lightning.") from error


class SoftPruning(Callback):
    """Prunes the network of a LightningModule during training.

    The callback creates the pruner before `configure_optimizers` is called and stores it as `module.pruner`, so that
    the optimizer can use `self.pruner.parameter_groups(weight_decay=...)`. The loss returned by `training_step` is
    passed through `pruner.loss`. Validation and test use the hard masks, by which :meth:`compact` cuts the network. The
    state of the pruner is saved in Lightning's checkpoints.

    With manual optimization, call `self.pruner.loss(...)` in `training_step`. With several optimizers, also call
    `self.pruner.attach(...)` in `configure_optimizers`, with the optimizer of the BatchNorms.

    Args:
        example: An input of the network: a tensor, a tuple of arguments, or (args, kwargs).
        network: Name of the submodule of the LightningModule to prune.
        make: Pruner class of `softprune.methods`, or any function of (network, example, **options) that returns one.
        options: Keyword arguments of the pruner, such as `strength=`, `target=` or `round_to=`. For a target,
            `total_steps` is by default the Trainer's number of optimizer steps.
    """

    def __init__(
        self, example: ExampleLike, *, network: str = "model", make: Callable[..., Pruner] = SoftPruner, **options: Any
    ) -> None:
        super().__init__()
        self.example, self.network, self.make, self.options = example, network, make, options
        self.pruner: Pruner | None = None
        self._state: dict[str, Any] | None = None
        self._plain_step: Callable[..., Any] | None = None

    # --- called by Lightning -------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or self.pruner is not None:
            return
        options = dict(self.options)
        if options.get("target") is not None and "total_steps" not in options:
            steps = trainer.estimated_stepping_batches
            if steps == math.inf:
                raise ConfigError(
                    "a target needs the length of the training. Got a Trainer without max_epochs or max_steps; set one "
                    "of them, or pass total_steps to the callback."
                )
            options["total_steps"] = int(steps)
        self._make(pl_module, options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore(trainer, pl_module)
        assert self.pruner is not None
        if not self.pruner.attached:
            if len(trainer.optimizers) != 1:
                raise ConfigError(
                    f"the pruner must be attached to one optimizer. Got {len(trainer.optimizers)}, none attached; call "
                    "self.pruner.attach(...) in configure_optimizers, with the optimizer of the BatchNorms."
                )
            self.pruner.attach(trainer.optimizers[0])
        if pl_module.automatic_optimization and self._plain_step is None:
            self._plain_step = pl_module.training_step
            pl_module.training_step = functools.partial(  # type: ignore[method-assign]
                _step_with_loss, self.pruner, pl_module.training_step
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.pruner is not None
        self.pruner.end_epoch(trainer.current_epoch)
        metrics = {f"softprune/{name}": value for name, value in self.pruner.metrics().items()}
        pl_module.log_dict(metrics, sync_dist=True)  # the same on every rank

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.pruner is not None:
            self.pruner.release()  # another fit creates another optimizer
        if self._plain_step is not None:
            del pl_module.training_step  # uncovers the method of the class
            self._plain_step = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.pruner is None else {"pruner": self.pruner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Applied when the fit or the evaluation starts, since the network may still be moved to another device.
        self._state = state_dict.get("pruner")

    # --- called by the user --------------------------------------------------------------------------------------

    def compact(self, model: nn.Module | None = None, **options: Any) -> nn.Module:
        """Return the verified compact network. Arguments are those of the pruner's `compact`."""
        if self.pruner is None:
            raise ConfigError(
                "`compact` needs a trained network. Got none; call trainer.fit, or validate a checkpoint."
            )
        self.pruner.decide()
        return self.pruner.compact(model, **options)

    # --- internal ------------------------------------------------------------------------------------------------

    def _make(self, module: LightningModule, options: dict[str, Any]) -> None:
        self.pruner = self.make(module.get_submodule(self.network), self.example, **options)
        module.pruner = self.pruner  # type: ignore[assignment]

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the pruner's state of a checkpoint. Create the pruner first if the Trainer evaluates without a fit."""
        if self._state is None:
            return
        with torch.inference_mode(False), torch.enable_grad():  # the Trainer evaluates in inference mode
            if self.pruner is None:
                budget = self._state.get("budget")
                self._make(pl_module, ({} if budget is None else {"total_steps": budget["total_steps"]}) | self.options)
            assert self.pruner is not None
            self.pruner.load_state_dict(self._state)
        self._state = None


def _step_with_loss(pruner: Pruner, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run training_step and add the method's loss to the returned loss."""
    output = step(*args, **kwargs)
    if isinstance(output, Tensor):
        return pruner.loss(output)
    if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": pruner.loss(output["loss"])}
    return output  # None: Lightning skips the step
