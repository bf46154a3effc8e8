"""The networks of a run as `inspect`, `export`, `bench` and `predict` need them: dense, compact, and an input."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softprune.cut import LARGEST_INPUT, apply_plan, check_saved_shapes, load, make_plan, read_origin, read_plans
from softprune.cut.plan import model_shapes
from softprune.cut.selection import read_graph
from softprune.errors import ConfigError, DataError, FileFormatError
from softprune.graph.sites import KINDS
from softprune.lab.config.settings import LARGEST_SIDE, RunConfig
from softprune.lab.data import DATASETS
from softprune.lab.data.files import evaluation_crop, is_image, read_image
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network, inputs_of, locate_compact, named_config
from softprune.lab.runs.result import Inputs
from softprune.lab.train.evaluate import refuse_dense
from softprune.lab.train.stage import open_data
from softprune.models import REGISTRY

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


def open_compact(
    path: Path, *, model: str = "", shape: tuple[int, ...] = (), by_record: bool = False, round_to: int = 0
) -> OpenedNetwork:
    """Open the compact network of a run, or a saved one. The data set is not needed.

    The dense network is ``model``, or else the one that the configuration of the file's run names, or else the origin
    noted in the file. With ``by_record`` a run's record is enough: the network then has its shapes and random weights,
    with widths in multiples of ``round_to``, if it is given.
    """
    run, compact = locate_compact(path)
    config = None if run is None else named_config(run, model, needs=("model",))
    itself = run if run is not None and run.path == path else None
    recorded = by_record and itself is not None and itself.result.is_file()
    if round_to and not recorded:
        raise ConfigError(f"--round-to needs the folder of a finished run. Got {path}.")
    if itself is not None and config is not None and (round_to or not compact.is_file()):
        refuse_dense(config, path)
        if recorded:
            return _shaped_like_record(itself, config, shape, round_to)
    if not compact.is_file():
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
    return OpenedNetwork(compact.resolve(), dense.eval(), load(compact, dense).float(), example)


def _shaped_like_record(run: RunFolder, config: RunConfig, shape: tuple[int, ...], round_to: int) -> OpenedNetwork:
    """Build the dense network of a run and cut it to the channels that the run's record says were kept."""
    record = run.read_result()
    masks = {site.name: torch.tensor(site.keep, dtype=torch.bool) for site in record.sites}
    if not all(map(len, masks.values())):
        raise ConfigError(
            "A run without compact.safetensors must have a record that says which channels were kept. Got "
            f"{run.result}, which does not; run `softprune compact` first."
        )
    inputs = record.inputs
    dense = dense_network(run.path, config, None if inputs is None else len(inputs.classes)).eval()
    shape = shape or (inputs.shape if inputs is not None else image_shape(config, run.compact))
    example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    for kinds in ((), KINDS):
        graph = read_graph(dense, example, every_norm=True, kinds=kinds)
        if masks.keys() <= {site.name for site in graph.sites}:
            plan = make_plan(graph, dense, masks, round_to=record.round_to or 1)
            if plan.params == record.compact.params:
                plan = make_plan(graph, dense, masks, round_to=round_to) if round_to else plan
                return OpenedNetwork(run.result.resolve(), dense, apply_plan(plan, dense), example)
    raise FileFormatError(
        f"The network of a record must be the one that was pruned. Got {config.model.name!r}, which does not have the "
        f"sites or, cut, the parameters of {run.result}; run `softprune compact {run.path}` and measure what it writes."
    )


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
    data = open_data(config, torch.device("cpu"), data_dir, in_memory=False)
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


def open_inputs(folder: RunFolder, *, model: str = "", data: str = "", data_dir: str | None = None) -> Inputs:
    """Return how images become inputs of a run's network: as its record says, or else its data set, which is opened."""
    found = folder.read_result().inputs if folder.result.is_file() else None
    if found is None:
        config = named_config(folder, model, data, needs=("model", "data"))
        found = inputs_of(open_data(config, torch.device("cpu"), data_dir, in_memory=False), config)
    if found is None:
        raise DataError(
            "`softprune predict` must know how an image becomes an input. Got a data set of your own with floats, made "
            f"by a transform that is not known ({config.data.name}). Let it return bytes, which softprune normalises, "
            f"or classify in Python with `softprune.load({str(folder.compact)!r}, network)`."
        )
    channels, *sides = found.shape
    if channels not in (1, 3) or not 0 < min(sides) <= max(sides) <= LARGEST_SIDE:
        raise DataError(
            f"Images to classify are grey or RGB, of at most {LARGEST_SIDE:,} pixels a side. Got a network for "
            f"{'x'.join(map(str, found.shape))}; classify in Python with `softprune.load`."
        )
    return found


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files among ``paths``, and the images in the folders among them."""
    files: list[Path] = []
    for path in paths:
        found = sorted(each for each in path.rglob("*") if is_image(str(each))) if path.is_dir() else [path]
        if not found:
            raise DataError(f"A folder to classify must hold images. Got {path}.")
        files += found
    return files


def open_images(files: Sequence[Path], inputs: Inputs) -> Tensor:
    """Read image files as a batch for a network."""
    channels, height, width = inputs.shape
    pixels = []
    for file in files:
        try:
            picture = read_image(file, "L" if channels == 1 else "RGB")
            for transform in evaluation_crop(height) if inputs.crop else ():
                picture = transform(picture)
        except Exception as error:  # decoders raise nearly anything
            raise DataError(
                f"An image to classify must be a readable image file. Got {file}: {error or type(error).__name__}."
            ) from error
        array = np.asarray(picture.resize((width, height)), dtype=np.float32)
        pixels.append(torch.from_numpy(array).reshape(height, width, channels).permute(2, 0, 1))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (inputs.mean, inputs.std))
    return (torch.stack(pixels) - mean) / std
