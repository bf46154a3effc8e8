"""The networks of a run as `inspect`, `export`, `bench` and `predict` need them: dense, compact, and an input."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softprune.config.settings import RunConfig
from softprune.data import DATASETS
from softprune.data.datasets import ArrayDataset
from softprune.data.folder import require_decoder
from softprune.data.images import byte_constants, evaluation_crop, open_image
from softprune.errors import ConfigError, DataError, FileFormatError
from softprune.models import REGISTRY
from softprune.plan.plan import model_shapes
from softprune.runs.folder import RunFolder
from softprune.runs.networks import build_network, locate_compact, named_config
from softprune.surgery import LARGEST_INPUT, check_saved_shapes, load, read_origin, read_plans
from softprune.train.from_checkpoint import refuse_dense
from softprune.train.run import open_data

LARGEST_CLASSES = 1_000_000
"""Classes that the file of a network may ask for: a small file could ask for any number."""


@dataclass(frozen=True)
class OpenedNetwork:
    """A compact network, the dense network it was cut from, and an example input."""

    path: Path
    dense: nn.Module
    """With fresh weights."""
    compact: nn.Module
    example: Tensor
    """One random image."""


def open_compact(path: Path, *, model: str = "", shape: tuple[int, ...] = ()) -> OpenedNetwork:
    """Open the compact network of a run, or a saved one. The data set is not needed.

    The dense network is ``model``, or else the one that the configuration of the file's run names, or else the origin
    noted in the file.
    """
    run, compact = locate_compact(path)
    config = None if run is None else named_config(run, model, needs=("model",))
    if not compact.is_file():
        if run is not None and config is not None and run.path == path:
            refuse_dense(config, path)
        raise ConfigError(
            "The argument must be the folder of a finished run (with compact.safetensors) or the .safetensors file of "
            f"a compact network. Got {path}. For an unfinished run, run `softprune compact` first."
        )
    origin = read_origin(compact) if config is None else None
    # A module:factory is code of whoever wrote the file, and runs only when the user names it.
    known = origin.model if origin is not None and origin.model in REGISTRY else ""
    name = config.model.name if config is not None else model or known
    if not name:
        raise ConfigError(
            "A compact network outside its run needs --model, unless it was cut from one of softprune's own networks. "
            f"Got {path} without --model."
        )
    if not shape and config is not None:
        shape = image_shape(config, compact)
    if not shape and origin is not None and origin.model == name:
        shape = origin.input_shape
    if not shape and name not in REGISTRY:
        raise ConfigError(
            f"A network of your own needs the shape of an image, such as --input 3x224x224. Got {name!r} without it."
        )
    dense = _definition(name, compact, {} if config is None else config.model.options)
    example = torch.randn(1, *(shape or REGISTRY[name].input_shape), generator=torch.Generator().manual_seed(0))
    return OpenedNetwork(compact.resolve(), dense.eval(), load(compact, dense), example)


def image_shape(config: RunConfig, compact: Path) -> tuple[int, ...]:
    """Return the shape of one image of a run's data set. Larger ones than a run may ask for need --input.

    For a data set of the user's own it is the one noted in the run's compact network.
    """
    entry, size = DATASETS.get(config.data.name), config.data.image_size
    origin = read_origin(compact) if entry is None and compact.is_file() else None
    if origin is not None and origin.model == config.model.name:
        return origin.input_shape
    if entry is None:
        raise ConfigError(
            "A data set of your own needs the shape of an image, such as --input 3x224x224. Got data.name = "
            f"{config.data.name!r} without it."
        )
    shape = entry.input_shape or (3, size, size)
    if math.prod(shape) > LARGEST_INPUT:
        raise ConfigError(
            f"A run can ask for images of at most {LARGEST_INPUT:,} numbers here. Got data.image_size = {size}; if "
            f"there is memory for it, give the shape yourself: --input 3x{size}x{size}."
        )
    return shape


def data_facts(config: RunConfig, data_dir: str | None) -> tuple[tuple[int, ...], int]:
    """Return the shape of an image and the number of classes of a data set, which is opened if they depend on it."""
    entry = DATASETS.get(config.data.name)
    if entry is not None and entry.input_shape is not None and entry.num_classes is not None:
        return entry.input_shape, entry.num_classes
    data = open_data(config, torch.device("cpu"), data_dir, download=False)
    return data.input_shape, data.num_classes


def dense_network(run: Path, config: RunConfig, num_classes: int | None = None) -> nn.Module:
    """Build the network that a run prunes, with fresh weights. The data set is not needed."""
    entry = DATASETS.get(config.data.name)  # a data set of the user's own has none
    classes = num_classes or (entry.num_classes if entry is not None else None)
    if classes is not None:
        return build_network(config.model.name, classes, config.model.options)
    compact = RunFolder(run).compact
    if compact.is_file():
        return _definition(config.model.name, compact, config.model.options)
    raise ConfigError(
        "The number of classes must be given for an unfinished run on a folder of images. Got "
        f"{run} without it; use --num-classes."
    )


def _definition(name: str, compact: Path, options: Mapping[str, Any]) -> nn.Module:
    """Build the dense network of a saved one, with the number of classes for which all shapes match."""
    plan = read_plans(compact)[0]
    # On the meta device no memory is allocated. Tensors that differ for ten classes belong to a classifier, so that the
    # right number is a size of each of them.
    with torch.device("meta"):
        probe = model_shapes(build_network(name, 10, options))
    differing = [set(plan.dense.get(key, ())) for key, shape in probe.items() if plan.dense.get(key) != shape]
    sizes = sorted(set.intersection(*differing)) if differing else [10]
    for size in sizes:
        if size > LARGEST_CLASSES:
            raise FileFormatError(
                f"The file of a network can ask for at most {LARGEST_CLASSES:,} classes. Got {size:,} in {compact}; if "
                "there is memory for them, build the network yourself and use `softprune.load`."
            )
        with torch.device("meta"):
            candidate = build_network(name, max(size, 1), options)
        if model_shapes(candidate) == plan.dense:
            check_saved_shapes(compact, candidate)  # the file must have the tensors that it asks for
            return build_network(name, size, options)
    raise FileFormatError(
        f"The network must be the one that was pruned, a {plan.model}. Got {name!r}, whose shapes do not match the "
        "plan for any number of classes."
    )


def open_images(
    files: Sequence[Path], config: RunConfig, data_dir: str | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Read image files as a batch for a run's network, and return it with the class names of the run's data set."""
    require_decoder()
    config = config.replace(data=config.data.replace(in_memory=False))  # only its classes and constants are needed
    data = open_data(config, torch.device("cpu"), data_dir, download=False)
    channels, height, width = data.input_shape
    pixels = []
    for file in files:
        try:
            picture = open_image(file, "L" if channels == 1 else "RGB")
            if not isinstance(data.test, ArrayDataset):
                picture = evaluation_crop(picture, height)
        except MemoryError:
            raise  # not the image's fault
        except Exception as error:  # decoders raise nearly anything
            raise DataError(
                f"An image to classify must be a readable image file. Got {file}: {error or type(error).__name__}."
            ) from error
        array = np.asarray(picture.resize((width, height)), dtype=np.float32)
        pixels.append(torch.from_numpy(array).reshape(height, width, channels).permute(2, 0, 1))
    batch = torch.stack(pixels)
    names = data.class_names or tuple(map(str, range(data.num_classes)))
    if isinstance(data.test, ArrayDataset):
        # Some data sets do not store 0 to 255; the digits store 0 to 16.
        return data.test.normalise(batch * (float(data.test.images.max()) / 255)), names
    # A transform of the user's own, which gives floats, is not known here.
    known = data.test.dtype == torch.uint8
    constants = (data.test.mean, data.test.std) if known else byte_constants(channels)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in constants)
    return (batch - mean) / std, names
