"""A trainer for ultralytics' detectors: YOLO pruned to a budget inside its own training."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softprune.cut import load, plans_of, remap_optimizer
from softprune.errors import ConfigError
from softprune.log import get_logger
from softprune.methods import SoftPruner
from softprune.target import TargetLike

try:
    from ultralytics import YOLO
    from ultralytics.models.yolo.detect import DetectionTrainer
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils import DEFAULT_CFG
    from ultralytics.utils.torch_utils import EarlyStopping, ModelEMA
except ImportError as error:
    raise ImportError('softprune.integrations.ultralytics needs `pip install "softprune[ultralytics]"`.') from error

logger = get_logger(__name__)

_STATE = "softprune_state"
"""Attribute of the network in a checkpoint from before the cut: the state of the pruner."""
_UNSUPPORTED = ("compile", "distill_model", "time")


class PruningTrainer(DetectionTrainer):  # type: ignore[misc]
    """A DetectionTrainer that prunes its network to a target while it trains::

        YOLO("yolo11n.pt").train(data="my.yaml", epochs=100, trainer=partial(PruningTrainer, target={"macs": 0.5}))

    In the first part of the training, up to `cut_at`, the network trains with masks. Then it is cut, verified, and
    takes the place of the dense one: optimizer, schedule and loader continue, the average of the weights starts again,
    and ultralytics sees an ordinary network from there on. `best.pt` is the best network after the cut.

    Without a target it trains a network that is compact already; ultralytics' own trainer would build the dense one.

    Args:
        cfg: ultralytics' own arguments, as `overrides` and `_callbacks`.
        target: The budget, such as ``{"macs": 0.5}``.
        cut_at: The share of the epochs that train with masks.
        options: Further ones of :class:`softprune.SoftPruner`: `round_to=`, `exclude=` ...
    """

    model: Any

    def __init__(
        self,
        cfg: Any = DEFAULT_CFG,
        overrides: dict[str, Any] | None = None,
        _callbacks: Any = None,
        *,
        target: TargetLike | None = None,
        cut_at: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(cfg, overrides, _callbacks)
        given = [name for name in _UNSUPPORTED if getattr(self.args, name, None)]
        given += ["several devices"] if self.ddp else []
        given += [] if self.args.epochs >= 2 else ["fewer than two epochs"]
        if target is not None and given:
            raise ConfigError(
                "pruning needs one device, a fixed number of epochs, at least two, and the network itself. Got "
                f"{', '.join(given)}; leave it out, and train the compact network further with it."
            )
        self.target, self.cut_at, self.options = target, cut_at, options
        self.pruner: SoftPruner | None = None
        self._steps = 0

    # --- what ultralytics calls ------------------------------------------------------------------------------------

    def get_model(self, cfg: Any = None, weights: nn.Module | None = None, verbose: bool = True) -> nn.Module:
        """Return the network to train: that of `weights` where it is compact already, which `cfg` does not describe."""
        if weights is None or not plans_of(weights):
            return super().get_model(cfg, weights, verbose)
        if weights.nc != self.data["nc"]:
            raise ConfigError(
                f"a compact network is trained on data with its own {weights.nc} classes. Got {self.data['nc']}; train "
                "the dense network on these data, and prune that."
            )
        return deepcopy(weights).train().requires_grad_(True)

    def build_optimizer(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return ultralytics' optimizer, with the pruner attached; the average of the weights is made after this."""
        optimizer = super().build_optimizer(model, *args, **kwargs)
        if self.target is None or (self.resume and plans_of(model)):  # which was cut before the training was stopped
            return optimizer
        epochs = min(max(1, round(self.cut_at * self.epochs)), self.epochs - 1)
        self._last_step = self._steps_of(epochs)
        example = torch.zeros(2, self.data["channels"], self.args.imgsz, self.args.imgsz, device=self.device)
        self._dense = deepcopy(model)  # checkpoints hold a network without masks
        self.pruner = SoftPruner(model, example, target=self.target, total_steps=self._last_step, **self.options)
        self.pruner.attach(optimizer)
        self._hook = model.register_forward_hook(self._add_loss)
        return optimizer

    def resume_training(self, ckpt: Any) -> None:
        super().resume_training(ckpt)
        if self.pruner is not None:
            self.stopper.patience = float("inf")  # the accuracy may fall while channels go

    def _load_checkpoint_state(self, ckpt: Any) -> None:
        """Load masks, clock and optimizer, to resume or to return from a loss that is not finite."""
        saved = getattr(ckpt["ema"], _STATE, None)
        if self.pruner is not None and saved is not None:
            self.pruner.load_state_dict(saved["pruner"])  # before the average, a copy of the network, is made
            self._steps = saved["steps"]
        super()._load_checkpoint_state(ckpt)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.pruner is not None:
            self._steps += 1
            if self._steps >= self._last_step:
                self._cut()

    def save_model(self) -> bool:
        """Write the checkpoints; before the cut last.pt alone, with the dense network and the state of the pruner."""
        if self.pruner is None:
            return bool(super().save_model())
        self.pruner.end_epoch(self.epoch)
        logger.info("softprune: %s", self.pruner.status)
        average = self.ema.ema
        self._dense.load_state_dict(average.state_dict())
        setattr(self._dense, _STATE, {"pruner": self.pruner.state_dict(), "steps": self._steps})
        self.ema.ema = self._dense
        try:
            saved = super().save_model()
        finally:
            self.ema.ema = average
        self.best.unlink(missing_ok=True)
        return bool(saved)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _add_loss(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Add the method's loss to that of a batch, which is the sum over its images."""
        if not (model.training and isinstance(args[0], dict) and self.pruner is not None):
            return output
        loss, parts = output
        images = len(args[0]["img"])
        return self.pruner.loss(loss.sum() / images) * images, parts

    def _steps_of(self, epochs: int) -> int:
        """Return the optimizer steps of so many epochs. In the warmup a step has fewer batches than afterwards."""
        batches = len(self.train_loader)
        warmup = max(1, round(batches * min(self.args.warmup_epochs, self.epochs - 1)))
        steps, last = 0, -1
        for batch in range(batches * epochs):
            if batch - last >= max(1, round(1 + (self.accumulate - 1) * min(1.0, batch / warmup))):
                steps, last = steps + 1, batch
        return max(1, steps)

    def _cut(self) -> None:
        """Put the compact network in the place of the masked one."""
        assert self.pruner is not None
        self._hook.remove()
        masked, compact = self.model, self.pruner.compact()
        logger.info("softprune: %s", self.pruner.certificate)
        self.pruner.release()
        remap_optimizer(self.optimizer, masked, compact)
        self.model, self.pruner = compact, None
        self.set_model_attributes()
        self._model_train()
        self.ema = ModelEMA(compact)
        self.best_fitness, self.stopper = None, EarlyStopping(patience=self.args.patience)


def prune_yolo(
    model: str | Path | YOLO, *, target: TargetLike, cut_at: float = 0.5, options: Any = None, **train: Any
) -> YOLO:
    """Train a detector (weights, an architecture or a YOLO object), prune it, and return its best.pt.

    `target`, `cut_at` and the dict `options` are those of :class:`PruningTrainer`; `train` is what `YOLO.train` takes.
    """
    yolo = model if isinstance(model, YOLO) else YOLO(model)
    yolo.train(trainer=partial(PruningTrainer, target=target, cut_at=cut_at, **(options or {})), **train)
    return yolo


def load_yolo(path: str | Path, config: str, names: dict[int, str]) -> YOLO:
    """Return the detector of a file of `softprune.save`, rebuilt from its architecture, such as "yolo11n.yaml".

    `names` are the classes, by number.
    """
    yolo = YOLO(config)
    yolo.model = load(path, DetectionModel(config, nc=len(names), verbose=False))
    yolo.model.names, yolo.model.args, yolo.model.task = names, yolo.overrides, "detect"
    return yolo
