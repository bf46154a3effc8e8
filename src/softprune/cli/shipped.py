"""What `export`, `bench` and `inspect` work on: a run's compact network, its dense definition, and an input."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softprune.config.settings import RunConfig
from softprune.data import DATASETS
from softprune.errors import ConfigError, FileFormatError
from softprune.models import REGISTRY
from softprune.plan import PrunePlan
from softprune.plan.plan import model_shapes
from softprune.runs.folder import RunFolder
from softprune.runs.networks import build_network, known_origin
from softprune.surgery import load
from softprune.surgery.saved import read_plans
from softprune.train.cutting import refuse_dense


@dataclass(frozen=True)
class Shipped:
    """A compact network with what it came from."""

    folder: Path
    dense: nn.Module
    """The definition, with fresh weights."""
    compact: nn.Module
    example: Tensor
    """One random image."""


def open_shipped(path: Path, *, model: str = "", shape: tuple[int, ...] = ()) -> Shipped:
    """The compact network of a run's folder, or of a compact folder; its data set is not needed.

    A compact folder inside its run takes the network from the run's configuration; elsewhere from what it says of its
    origin, or `model` must say.
    """
    run = path if (path / "config.toml").is_file() else path.parent
    compact = path / "compact" if run == path else path
    config = RunFolder(run).read_config() if (run / "config.toml").is_file() else None
    if not (compact / "plan.json").is_file():
        if config is not None and run == path:
            refuse_dense(config, path)
        raise ConfigError(
            "this command takes the folder of a finished run (with compact/plan.json) or of a compact network (with "
            f"plan.json). Got {path}, which has neither; `softprune compact` cuts the network of an unfinished run."
        )
    origin = known_origin(compact) if config is None else None
    name = model or (config.model.name if config is not None else origin.model if origin is not None else "")
    if not name:
        raise ConfigError(
            "a compact folder outside its run needs --model, unless it says itself that it comes from one of "
            f"softprune's own networks. Got {path} alone."
        )
    if not shape and config is not None:
        shape = image_shape(config)
    if not shape and origin is not None and origin.model == name:
        shape = origin.input_shape
    if not shape and name not in REGISTRY:
        raise ConfigError(
            f"a network of your own needs the shape of an image: --input 3x224x224. Got {name!r} alone."
        )
    dense = _definition(name, read_plans(compact)[0])
    example = torch.randn(
        1, *(shape or REGISTRY[name].input_shape), generator=torch.Generator().manual_seed(0)
    )
    return Shipped(compact.resolve(), dense.eval(), load(compact, dense), example)


def image_shape(config: RunConfig) -> tuple[int, ...]:
    """The shape of one image of a run's data set."""
    size = config.data.image_size
    return DATASETS[config.data.name].input_shape or (3, size, size)


def dense_network(run: Path, config: RunConfig, num_classes: int | None = None) -> nn.Module:
    """The network that a run prunes, with fresh weights; its data set is not needed."""
    classes = DATASETS[config.data.name].num_classes if num_classes is None else num_classes
    if classes is not None:
        return build_network(config.model.name, classes)
    folder = RunFolder(run).compact
    if (folder / "plan.json").is_file():
        return _definition(config.model.name, read_plans(folder)[0])
    raise ConfigError(
        "An unfinished run on images from folders does not say how many classes there are. Got "
        f"{run} alone; say it with --num-classes."
    )


def _definition(name: str, plan: PrunePlan) -> nn.Module:
    """The dense network that `plan` was made for: its number of classes is the size that makes all shapes agree."""
    sizes = dict.fromkeys(shape[0] for shape in reversed(plan.dense.values()) if shape)
    # Checked without weights: building every candidate in earnest would draw all of them.
    for size in sizes:
        with torch.device("meta"):
            shapes = model_shapes(build_network(name, size))
        if shapes == plan.dense:
            return build_network(name, size)
    raise FileFormatError(
        f"the network must be the one that was pruned, a {plan.model}. Got {name!r}, whose shapes agree with the plan "
        "for no number of classes."
    )
