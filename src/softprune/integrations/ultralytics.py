"""A trainer for ultralytics' detectors that prunes YOLO to a target during training."""

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
"""Attribute of the network in a checkpoint before the cut, with the state of the pruner."""
_UNSUPPORTED = ("compile", "distill_model", "time")


class PruningTrainer(DetectionTrainer):  # type: ignore[misc]
    """A DetectionTrainer that prunes its network to a target during training::

        YOLO("yolo11n.pt").train(data="my.yaml", epochs=100, trainer=partial(PruningTrainer, target={"macs": 0.5}))

    Up to `cut_at`, the network trains with masks. Then it is cut and verified, and the compact network replaces it:
    optimizer, schedule and data loader continue, and the moving average of the weights restarts. From then on
    ultralytics trains an ordinary network. `best.pt` is the best network after the cut.

    Without a target, it trains a compact network further; ultralytics' own trainer would rebuild the dense network.

    Args:
        cfg: ultralytics' own arguments, like `overrides` and `_callbacks`.
        target: The target, such as ``{"macs": 0.5}``.
        cut_at: Share of the epochs that train with masks.
        options: Further arguments of :class:`softprune.SoftPruner`, such as `round_to=` and `exclude=`.
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
                "pruning needs one device, a fixed number of at least two epochs, and no compilation or distillation. "
                f"Got {', '.join(given)}; omit it, and use it when training the compact network further."
            )
        self.target, self.cut_at, self.options = target, cut_at, options
        self.pruner: SoftPruner | None = None
        self._steps = 0

    # --- called by ultralytics -------------------------------------------------------------------------------------

    def get_model(self, cfg: Any = None, weights: nn.Module | None = None, verbose: bool = True) -> nn.Module:
        """Return the network to train: a copy of `weights` if it is compact, since `cfg` describes the dense one."""
        if weights is None or not plans_of(weights):
            return super().get_model(cfg, weights, verbose)
        if weights.nc != self.data["nc"]:
            raise ConfigError(
                f"a compact network must be trained on data with its {weights.nc} classes. Got {self.data['nc']}; "
                "train and prune the dense network on this data instead."
            )
        return deepcopy(weights).train().requires_grad_(True)

    def build_optimizer(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return ultralytics' optimizer with the pruner attached. Called before the moving average is created."""
        optimizer = super().build_optimizer(model, *args, **kwargs)
        if self.target is None or (self.resume and plans_of(model)):  # resumed after the cut
            return optimizer
        epochs = min(max(1, round(self.cut_at * self.epochs)), self.epochs - 1)
        self._last_step = self._steps_of(epochs)
        example = torch.zeros(2, self.data["channels"], self.args.imgsz, self.args.imgsz, device=self.device)
        self._dense = deepcopy(model)  # for checkpoints, which hold a network without masks
        self.pruner = SoftPruner(model, example, target=self.target, total_steps=self._last_step, **self.options)
        self.pruner.attach(optimizer)
        self._hook = model.register_forward_hook(self._add_loss)
        return optimizer

    def resume_training(self, ckpt: Any) -> None:
        super().resume_training(ckpt)
        if self.pruner is not None:
            self.stopper.patience = float("inf")  # the accuracy may drop while channels are removed

    def _load_checkpoint_state(self, ckpt: Any) -> None:
        """Load the states of pruner and optimizer, to resume, or to recover from a non-finite loss."""
        saved = getattr(ckpt["ema"], _STATE, None)
        if self.pruner is not None and saved is not None:
            self.pruner.load_state_dict(saved["pruner"])  # before the network is copied for the moving average
            self._steps = saved["steps"]
        super()._load_checkpoint_state(ckpt)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.pruner is not None:
            self._steps += 1
            if self._steps >= self._last_step:
                self._cut()

    def save_model(self) -> bool:
        """Save the checkpoints. Before the cut, save only last.pt: the dense network and the state of the pruner."""
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

    # --- internal --------------------------------------------------------------------------------------------------

    def _add_loss(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Add the method's loss to the loss of a batch, which ultralytics sums over the images."""
        if not (model.training and isinstance(args[0], dict) and self.pruner is not None):
            return output
        loss, parts = output
        images = len(args[0]["img"])
        return self.pruner.loss(loss.sum() / images) * images, parts

    def _steps_of(self, epochs: int) -> int:
        """Return the number of optimizer steps in `epochs` epochs. Steps accumulate fewer batches in the warm-up."""
        batches = len(self.train_loader)
        warmup = max(1, round(batches * min(self.args.warmup_epochs, self.epochs - 1)))
        steps, last = 0, -1
        for batch in range(batches * epochs):
            if batch - last >= max(1, round(1 + (self.accumulate - 1) * min(1.0, batch / warmup))):
                steps, last = steps + 1, batch
        return max(1, steps)

    def _cut(self) -> None:
        """Replace the masked network by the compact one."""
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
    """Train and prune a detector (a file of weights, an architecture or a YOLO object); return its best.pt.

    `target`, `cut_at` and `options` are passed to :class:`PruningTrainer`, and `train` to `YOLO.train`.
    """
    yolo = model if isinstance(model, YOLO) else YOLO(model)
    yolo.train(trainer=partial(PruningTrainer, target=target, cut_at=cut_at, **(options or {})), **train)
    return yolo


def load_yolo(path: str | Path, config: str, names: dict[int, str]) -> YOLO:
    """Load a detector saved by `softprune.save`. `config` is its dense architecture, such as "yolo11n.yaml".

    `names` maps class indices to class names.
    """
    yolo = YOLO(config)
    yolo.model = load(path, DetectionModel(config, nc=len(names), verbose=False))
    yolo.model.names, yolo.model.args, yolo.model.task = names, yolo.overrides, "detect"
    return yolo
