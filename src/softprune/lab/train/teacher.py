"""The teacher of a run with distillation: a trained dense network, loaded and checked before training."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softprune import models
from softprune.errors import ConfigError, SoftpruneError
from softprune.lab.config.settings import BASELINE, RunConfig
from softprune.lab.data import DataBundle
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network, check_outputs
from softprune.lab.runs.weights import load_weights, read_weights
from softprune.lab.world import World
from softprune.methods.distillation import distillation_loss


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
        network = _network_at(path, config, data)
    except (SoftpruneError, RuntimeError) as error:
        raise ConfigError(
            f"distill.teacher must be a trained dense network for these classes: a finished dense run, or a file with "
            f"weights. Got {path}: {error}"
        ) from error
    network = network.eval().requires_grad_(False).to(world.device)
    if config.train.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_outputs(network, data, f"distill.teacher, {path},", "name a network that was trained on this data set")
    return Teacher(network, config.distill.weight, config.distill.temperature, _checksum(network))


def _network_at(path: Path, config: RunConfig, data: DataBundle) -> nn.Module:
    """Return the network of a dense run, or one like that of ``config`` with the weights of a file."""
    run, model = RunFolder(path), config.model
    if run.config.is_file():
        other = run.read_config()
        if other.method.name != "dense" or not run.result.is_file():
            inside = f", whose dense baseline is {run.dense}" if run.dense.is_dir() else ""
            raise ConfigError(f"a run with method {other.method.name}{inside}, or one that is not finished.")
        # A run's folder is data: only factories that this run names itself are imported.
        if other.model.name not in (*models.REGISTRY, config.model.name):
            raise ConfigError(f"a run with model.name = {other.model.name!r}, which this run does not name.")
        model = other.model
    with torch.random.fork_rng(devices=[]):  # the run's own start must not depend on its teacher
        network = build_network(model.name, data.num_classes, model.options)
    if not load_weights(network, read_weights(path), str(path), data.num_classes):
        raise ConfigError(f"a network without a classifier for the {data.num_classes} classes of the run.")
    return network


def _checksum(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
