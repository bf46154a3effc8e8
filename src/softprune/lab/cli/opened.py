"""Open the compact network of a run, or a saved one, and images to classify: for `export`, `bench` and `predict`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softprune.cut import load, read_origin, read_plans
from softprune.cut.plan import model_shapes
from softprune.errors import ConfigError, DataError, FileFormatError
from softprune.lab.data.files import evaluation_crop, is_image, read_image
from softprune.lab.runs.networks import build_network, locate_compact, named_config, refuse_dense
from softprune.lab.runs.result import Inputs
from softprune.models import REGISTRY


@dataclass(frozen=True)
class OpenedNetwork:
    """A compact network, the dense network it was cut from, and an example input."""

    path: Path
    dense: nn.Module
    """With fresh weights."""
    compact: nn.Module
    example: Tensor
    """One random image."""


def open_compact(path: Path, model: str = "", shape: tuple[int, ...] = ()) -> OpenedNetwork:
    """Open the compact network of a run, or a saved one. The data set is not needed.

    The dense network is ``model``, or else the one that the configuration of the file's run names, or else the origin
    noted in the file.
    """
    run, compact = locate_compact(path)
    config = None if run is None else named_config(run, model=model)
    if config is not None:
        refuse_dense(config, path)
    if not compact.is_file():
        raise ConfigError(
            "The argument must be the folder of a finished run (with compact.safetensors) or the .safetensors file of "
            f"a compact network. Got {path}. For an unfinished run, run `softprune compact` first."
        )
    origin = read_origin(compact)
    # A module:factory is code of whoever wrote the file, and runs only when the user names it.
    known = origin.model if origin is not None and origin.model in REGISTRY else ""
    name = config.model.name if config is not None else model or known
    if not name:
        raise ConfigError(
            "A compact network outside its run needs --model, unless it was cut from one of softprune's own networks. "
            f"Got {path} without --model."
        )
    if not shape and origin is not None and origin.model == name:
        shape = origin.input_shape
    if not shape and name not in REGISTRY:
        raise ConfigError(
            f"A network of your own needs the shape of an image, such as --input 3x224x224. Got {name!r} without it."
        )
    dense = _definition(name, compact, {} if config is None else config.model.options)
    example = torch.randn(1, *(shape or REGISTRY[name].input_shape), generator=torch.Generator().manual_seed(0))
    return OpenedNetwork(compact.resolve(), dense.eval(), load(compact, dense).float(), example)


def _definition(name: str, compact: Path, options: Mapping[str, Any]) -> nn.Module:
    """Build the dense network of a saved one, with the number of classes for which all shapes match."""
    plan = read_plans(compact)[0]
    # On the meta device no memory is allocated. Tensors that differ for ten classes belong to a classifier, so that the
    # right number is a size of each of them.
    with torch.device("meta"):
        probe = model_shapes(build_network(name, 10, options))
        differing = [set(plan.dense.get(key, ())) for key, shape in probe.items() if plan.dense.get(key) != shape]
        for classes in set.intersection(*differing) if differing else {10}:
            if classes and model_shapes(build_network(name, classes, options)) == plan.dense:
                break
        else:
            raise FileFormatError(
                f"The network must be the one that was pruned, a {plan.model}. Got {name!r}, whose shapes do not match "
                "the plan for any number of classes."
            )
    return build_network(name, classes, options)


def open_images(paths: Iterable[Path], inputs: Inputs) -> Iterator[tuple[Path, Tensor]]:
    """Yield the images among ``paths``, and those in the folders among them, as batches of one for a network."""
    channels, height, width = inputs.shape
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (inputs.mean, inputs.std))
    for path in paths:
        files = sorted(each for each in path.rglob("*") if is_image(str(each))) if path.is_dir() else [path]
        if not files:
            raise DataError(f"A folder to classify must hold images. Got {path}.")
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
            pixels = torch.from_numpy(array).reshape(height, width, channels).permute(2, 0, 1)
            yield file, ((pixels - mean) / std)[None]
