"""The network of a run: from the registry or the user's own module, with fresh or given weights."""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softprune import models
from softprune.cut import Origin, saved_path
from softprune.errors import ConfigError, storable
from softprune.lab.config.settings import BASELINE, ModelConfig, RunConfig
from softprune.lab.data import DATASETS, ArrayDataset, DataBundle
from softprune.lab.factories import call_factory, check_name, import_factory
from softprune.lab.runs.folder import RunFolder, own_names
from softprune.lab.runs.result import Inputs
from softprune.lab.runs.weights import load_weights, read_weights
from softprune.log import get_logger
from softprune.module_state import evaluating

logger = get_logger(__name__)


def build_network(
    name: str, num_classes: int | None, options: Mapping[str, Any] | None = None, **more: Any
) -> nn.Module:
    """Build the network that ``name`` means: a registry name, or ``module:factory``.

    A factory is called with ``num_classes=``, unless that is None, and with ``options`` and ``more``.
    """
    check_name("model.name", name, models.REGISTRY, options=options or more)
    classes = {} if num_classes is None else {"num_classes": num_classes}
    given = {**classes, **(options or {}), **more}
    if ":" not in name:
        return models.build(name, given["num_classes"])
    network = call_factory(name, "model.name", given)
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"The factory of model.name must return an nn.Module. Got {type(network).__name__} from {name!r}."
        )
    return network


def named_config(
    folder: RunFolder,
    model: str = "",
    data: str = "",
    method: str = "",
    *,
    needs: Collection[str] = ("model", "data", "method"),
) -> RunConfig:
    """Return the configuration of a run, with the names from the command line in place of its own.

    The folder of a run is data. A ``module:factory`` in its config.toml is code of whoever wrote it, and is imported
    only if the user names it too. ``needs`` says which of the names will be imported; the others are not checked.
    """
    config = folder.read_config()
    given = {"model": model, "data": data, "method": method}
    for key, own in own_names(config).items():
        if key in needs and not given[key]:
            raise ConfigError(
                f"Code that a run's config.toml names is imported only if the command names it too. Got {key}.name = "
                f"{own!r} in {folder.config}; if you trust it, add `--{key} {own}`."
            )
    return config.replace(
        model=config.model if model in ("", config.model.name) else ModelConfig(name=model),
        data=config.data.replace(name=data or config.data.name),
        method=config.method.replace(name=method or config.method.name),
    )


def origin_of(config: RunConfig, data: DataBundle) -> Origin:
    """Return the origin that a run stores in its compact networks."""
    return Origin(config.model.name, config.data.name, data.input_shape)


def inputs_of(data: DataBundle, config: RunConfig) -> Inputs | None:
    """Return how the images of a data set become inputs; None for floats of a transform that is not known."""
    test, unit, entry = data.test, 1.0, DATASETS.get(config.data.name)
    # With data.in_memory, images in files are arrays too.
    crop = not isinstance(test, ArrayDataset) or (entry is not None and entry.input_shape is None)
    if isinstance(test, ArrayDataset):
        if not crop:  # some data sets do not store 0 to 255; the digits store 0 to 16
            low, high = (float(value) for value in test.images.aminmax())
            if low < 0 or high <= 0:
                return None
            unit = 255 / high
    elif test.dtype != torch.uint8:
        return None
    mean, std = (torch.as_tensor(values, dtype=torch.float64).flatten().tolist() for values in (test.mean, test.std))
    channels, height, width = data.input_shape
    return Inputs(
        shape=(channels, height, width),
        crop=crop,
        mean=tuple(unit * value for value in mean),
        std=tuple(unit * value for value in std),
        classes=tuple(map(storable, data.class_names or map(str, range(data.num_classes)))),
    )


def locate_compact(path: Path) -> tuple[RunFolder | None, Path]:
    """Return the run that ``path`` is or lies in, if there is one, and the file of the compact network."""
    run, around = RunFolder(path), RunFolder(path.parent)
    if run.config.is_file():
        return run, run.compact
    return around if around.config.is_file() else None, saved_path(path)


def check_outputs(network: nn.Module, data: DataBundle, what: str, remedy: str) -> None:
    """Raise a ConfigError unless the network maps images of the data set to one number per class."""
    example = data.example(2, next(network.parameters(), torch.empty(0)).device)
    try:
        with evaluating(network), torch.no_grad():
            found = network(example)
    except Exception as error:
        raise ConfigError(
            f"{what} must accept the images of the data set, of shape {'x'.join(map(str, data.input_shape))}. Got "
            f"{type(error).__name__}: {error}; {remedy}."
        ) from error
    shape = tuple(found.shape) if isinstance(found, Tensor) else None
    if shape != (2, data.num_classes):
        raise ConfigError(
            f"{what} must return one number per class, a tensor of shape (batch, {data.num_classes}). Got "
            f"{shape or type(found).__name__} for 2 images; {remedy}, or use the argument num_classes of the factory."
        )


def check_training_outputs(network: nn.Module, data: DataBundle, what: str) -> None:
    """Raise a ConfigError if the network returns more in training than one tensor. Its statistics change."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            found = network.train()(data.example(2))
    except Exception:  # the first step says what is wrong, with a whole batch
        return
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"{what} must return a tensor, one number per class, in training as in evaluation. Got "
            f"{type(found).__name__} in training; build it without auxiliary heads (those of torchvision with "
            "model.options.aux_logits = false), or train it in a loop of your own."
        )


def starting_network(config: ModelConfig, num_classes: int, seed: int) -> tuple[nn.Module, bool]:
    """Build the network that a run starts from; return it and whether all of it is trained.

    The weights of the run's own baseline do not exist before it is trained: the network is then initialised at random.
    """
    torch.manual_seed(seed)
    network = build_network(config.name, num_classes, config.options)
    if config.weights not in ("", BASELINE):
        path = Path(config.weights).expanduser()
        return network, load_weights(network, read_weights(path), str(path), num_classes)
    if config.pretrained:
        source = f"the trained weights of {config.name}"
        return network, load_weights(network, _pretrained_weights(config), source, num_classes)
    return network, False


def _pretrained_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return the trained weights that a factory of torchvision or timm provides, with its own classifier."""
    factory = import_factory(config.name, "model.name") if ":" in config.name else None
    keywords = inspect.signature(factory).parameters if callable(factory) else {}
    # timm's factories take both names in **kwargs, but declare only their own.
    if "pretrained" in keywords:
        trained: dict[str, Any] = {"pretrained": True}
    elif "weights" in keywords:
        trained = {"weights": "DEFAULT"}
    else:
        raise ConfigError(
            "model.pretrained needs a factory with the keyword `pretrained` (timm) or `weights` (torchvision). Got "
            f"{config.name!r}; pass a file with model.weights instead."
        )
    try:
        with torch.random.fork_rng(devices=[]):
            return build_network(config.name, None, config.options, **trained).state_dict()
    except (OSError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"The trained weights of {config.name} must be in the local cache or downloadable. Got "
            f"{type(error).__name__}: {error}. Connect to the network once, or pass a file with model.weights."
        ) from error
