"""The teacher of a run with distillation: a trained dense network, loaded and checked before training."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softprune import models
from softprune.distillation import distillation_loss
from softprune.distributed import World
from softprune.errors import CheckpointError, ConfigError, FileFormatError, SoftpruneError
from softprune.lab.config.settings import BASELINE, START, ModelConfig, RunConfig
from softprune.lab.data import DataBundle
from softprune.lab.runs.checkpoint import read_newest, restoring
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network, check_outputs
from softprune.lab.runs.weights import load_weights, read_weights
from softprune.lab.train.optim import WeightAverage


@dataclass(frozen=True)
class Teacher:
    """A trained network and how much the network in training learns from it."""

    network: nn.Module
    """In eval mode, without gradients, on the device that trains."""
    weight: float
    temperature: float
    checksum: str
    """SHA-256 of its weights, by which a resumed run notices another teacher."""

    @torch.no_grad()
    def outputs(self, images: Tensor) -> Tensor:
        return self.network(images)

    def joint_loss(self, task: Tensor, logits: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
        # The task loss may be of mixed or smoothed labels, so only the teacher's part is taken from the function.
        soft = distillation_loss(logits, outputs, labels, weight=1.0, temperature=self.temperature)
        return self.weight * soft + (1 - self.weight) * task


def load_teacher(config: RunConfig, folder: RunFolder | None, data: DataBundle, world: World) -> Teacher:
    """Load the teacher that ``config`` names. ``folder`` is the run's folder, for its dense baseline."""
    name = config.distill.teacher
    assert name != BASELINE or folder is not None
    path = folder.dense if name == BASELINE and folder is not None else Path(name).expanduser()
    try:
        is_run = RunFolder(path).config.is_file()
        network = _run_network(path, config, data) if is_run else _file_network(path, config, data)
    except ConfigError:
        raise
    except (SoftpruneError, RuntimeError) as error:
        raise ConfigError(
            f"distill.teacher must be a trained network for these classes. Got {path}: {error}"
        ) from error
    network = network.eval().requires_grad_(False).to(world.device)
    if config.train.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_outputs(network, data, f"distill.teacher, {path},", "name a network that was trained on this data set")
    return Teacher(network, config.distill.weight, config.distill.temperature, _checksum(network))


def check_same_teacher(teacher: Teacher | None, state: dict[str, Any]) -> None:
    """Raise a CheckpointError if the run was trained with another teacher until now."""
    now = None if teacher is None else teacher.checksum
    if now != state["teacher"]:
        raise CheckpointError(
            "A run must be resumed with the teacher that it began with. Got other weights; restore the teacher's files."
        )


def _run_network(path: Path, config: RunConfig, data: DataBundle) -> nn.Module:
    """Build the network of a finished dense run, with the weights that it evaluated."""
    folder = RunFolder.open(path)
    other = folder.read_config()
    if not folder.result.is_file():
        raise ConfigError(
            f"distill.teacher must be a finished run. Got {path}, which has no result; finish it with "
            f"`{folder.resume_command}`."
        )
    if other.method.name != "dense":
        inside = f" Use its dense baseline: {folder.dense}." if folder.dense.is_dir() else ""
        raise ConfigError(
            f"distill.teacher must be a dense network. Got {path}, a run with method {other.method.name}.{inside}"
        )
    # A run's folder is data: only factories that this run names itself are imported.
    if other.model.name not in models.REGISTRY and other.model.name != config.model.name:
        raise ConfigError(
            f"distill.teacher must be one of softprune's networks or model.name, {config.model.name}. Got {path} with "
            f"{other.model.name}; pass its weights to a run with the same model.name."
        )
    network = _built(other.model, data)
    state = read_newest(folder.checkpoints)[1]
    with restoring():
        network.load_state_dict(state["model"])
        if state["stage"]["average"] is not None:
            average = WeightAverage(network, other.train.ema)
            average.load_state_dict(state["stage"]["average"])
            average.exchange()
    return network


def _file_network(path: Path, config: RunConfig, data: DataBundle) -> nn.Module:
    if not path.is_file():
        raise ConfigError(
            f'distill.teacher must be "{BASELINE}", "{START}", the folder of a run or a file with weights. Got {path}, '
            f"which {'is neither' if path.exists() else 'does not exist'}. If the teacher of a run that was started is "
            "elsewhere now, change the path in its config.toml."
        )
    network = _built(config.model, data)
    if not load_weights(network, read_weights(path), str(path), data.num_classes):
        raise FileFormatError(
            f"A teacher must have the {data.num_classes} classes of the run. Got {path} with other classes, or without "
            "a classifier; train it on this data first."
        )
    return network


def _built(model: ModelConfig, data: DataBundle) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # the run's own start must not depend on its teacher
        return build_network(model.name, data.num_classes, model.options)


def _checksum(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
