"""Test accuracy of networks while a run goes on."""

from torch import nn

from softprune.config.settings import RunConfig
from softprune.data import DataBundle
from softprune.distributed import World
from softprune.train.eval_step import EvalStep, EvalTotals


class Evaluator:
    """Evaluates networks on the test images; keeps what it prepared for a network as long as that one comes."""

    def __init__(self, data: DataBundle, config: RunConfig, world: World) -> None:
        self._data, self._config, self._world = data, config, world
        self._step: EvalStep | None = None

    def __call__(self, network: nn.Module) -> EvalTotals:
        """Accuracy and loss of ``network``. All processes must call it together."""
        if self._step is None or self._step.model is not network:
            train = self._config.train
            self._step = EvalStep(
                network,
                self._data.test,
                batch_size=self._config.data.eval_batch_size,
                bf16=train.precision == "bf16",
                channels_last=train.channels_last,
                graph=train.mode != "eager",
                workers=self._config.data.workers,
                rank=self._world.rank,
                world_size=self._world.size,
            )
        return self._step()
