"""The network of a run: from the registry or the user's own module, with fresh or given weights."""

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from softprune import models
from softprune.cut import load, read_origin, read_plans, saved_path
from softprune.cut.plan import model_shapes
from softprune.errors import ConfigError, FileFormatError, first_line
from softprune.io import LARGEST_NETWORK, read_bytes
from softprune.lab.config.settings import BASELINE, ModelConfig, RunConfig
from softprune.lab.data import DataBundle
from softprune.lab.factories import call_factory, check_name, import_factory, is_factory_name
from softprune.lab.runs.checkpoint import load_tensors, read_newest
from softprune.lab.runs.folder import RunFolder
from softprune.log import get_logger

logger = get_logger(__name__)

_STATE_KEYS = ("state_dict", "model", "model_state")
"""Under one of these a file may hold the state_dict."""


def build_network(name: str, num_classes: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the network that ``name`` means: a registry name, or ``module:factory``, which is called with options."""
    check_name("model.name", name, models.REGISTRY, options=options)
    if ":" not in name:
        return models.build(name, num_classes)
    return call_factory(name, "model.name", {"num_classes": num_classes, **(options or {})})


def named_config(folder: RunFolder, **names: str) -> RunConfig:
    """Return the configuration of a run, if the command names what code of the user's own it names.

    The folder of a run is data. A ``module:factory`` in its config.toml is code of whoever wrote it, and is imported
    only if the user names it too. ``names`` are what the command names as model, data and method, where it needs them.
    """
    config = folder.read_config()
    for key, given in names.items():
        own = config.setting(f"{key}.name")
        if given != own and (given or is_factory_name(own)):
            raise ConfigError(
                "A run is used with its own network, data and method, and code that its config.toml names is imported "
                f"only if the command names it too. Got {key}.name = {own!r} in {folder.config} and {given!r} in the "
                f"command; if you trust it, add `--{key} {own}`."
            )
    return config


def check_outputs(network: nn.Module, data: DataBundle, what: str, remedy: str) -> None:
    """Raise a ConfigError unless the network maps images of the data set to one number per class, in both modes."""
    example = data.example(2, next(network.parameters(), torch.empty(0)).device)
    for training in (False, True):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                found = copy.deepcopy(network).train(training)(example)
        except Exception as error:
            raise ConfigError(
                f"{what} must accept the images of the data set, of shape {'x'.join(map(str, data.input_shape))}. Got "
                f"{type(error).__name__}: {error}; {remedy}."
            ) from error
        shape = tuple(found.shape) if isinstance(found, Tensor) else None
        if shape != (2, data.num_classes):
            raise ConfigError(
                f"{what} must return one number per class, a tensor of shape (batch, {data.num_classes}), without "
                f"auxiliary heads. Got {shape or type(found).__name__} for 2 images in "
                f"{'training' if training else 'evaluation'}; {remedy}."
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
    keywords = inspect.signature(import_factory(config.name, "model.name")).parameters if ":" in config.name else {}
    # timm's factories take both names in **kwargs, but declare only their own.
    if "pretrained" in keywords:
        trained: dict[str, Any] = {"pretrained": True}
    elif "weights" in keywords:
        trained = {"weights": "DEFAULT"}
    else:
        raise ConfigError(
            "model.pretrained needs a factory with the keyword `pretrained` (timm) or `weights` (torchvision). Got "
            f"{config.name!r}; pass a file with model.weights, or set model.pretrained=false."
        )
    with torch.random.fork_rng(devices=[]):
        return call_factory(config.name, "model.name", {**config.options, **trained}).state_dict()


# --- weights ---------------------------------------------------------------------------------------------------------


def load_weights(network: nn.Module, state: Mapping[str, Tensor], source: str, num_classes: int) -> bool:
    """Copy weights into ``network``; return whether all of them fit.

    A classifier for other classes keeps its random start, with a warning. Anything else that does not fit is an error.
    ``source`` says where ``state`` is from, for messages.
    """
    expected = network.state_dict()
    heads = [f"{name}." for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    # A classifier for other classes differs in its first dimension alone.
    head = [
        name
        for name, own in expected.items()
        if name.startswith(tuple(heads)) and name in state and own.ndim == state[name].ndim
        if own.shape[:1] == (num_classes,) != state[name].shape[:1] and own.shape[1:] == state[name].shape[1:]
    ]
    try:
        network.load_state_dict({**state, **{name: expected[name] for name in head}})
    except RuntimeError as error:
        raise FileFormatError(
            f"The weights must be those of a {type(network).__name__} like this one. Got {source}: {error}. Check "
            "model.name and the number of classes; for a compact network, use `softprune.load` in Python."
        ) from error
    if head:
        logger.warning(
            "softprune: %s has a classifier for %d classes instead of %d: not loaded, and initialised at random: %s",
            *(source, len(state[head[0]]), num_classes, ", ".join(head)),
        )
    return not head


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state_dict from a file or from the newest checkpoint of a run."""
    if path.is_dir():
        state = read_newest(RunFolder.open(path).checkpoints)[1]
        if state["history"]["cuts"]:
            raise FileFormatError(
                f"model.weights must be of a dense network. Got the run {path}, whose network was cut in training."
            )
        return state["model"]
    raw = read_bytes(path, LARGEST_NETWORK)
    try:
        content: Any = safetensors.torch.load(raw) if path.suffix == ".safetensors" else load_tensors(raw)
        content = next((content[key] for key in _STATE_KEYS if key in content), content)
        if not all(isinstance(value, Tensor) for value in content.values()):
            raise TypeError("other values than tensors")
        return {name.removeprefix("module."): value for name, value in content.items()}
    except Exception as error:  # what torch.load refuses has no common class
        raise FileFormatError(
            "model.weights must be a .safetensors file, a PyTorch file with a state_dict (alone, or as "
            f"{', '.join(map(repr, _STATE_KEYS))} in a dictionary), or the folder of a run. Got {path}: "
            f"{first_line(error)}. Save model.state_dict() instead."
        ) from error


# --- compact networks ------------------------------------------------------------------------------------------------


class OpenedNetwork(NamedTuple):
    """A compact network, its file, the dense network it was cut from (with fresh weights), and one random image."""

    path: Path
    dense: nn.Module
    compact: nn.Module
    example: Tensor


def open_compact(path: Path, model: str = "", shape: tuple[int, ...] = ()) -> OpenedNetwork:
    """Open the compact network of a run, or a saved one. The data set is not needed.

    The dense network is ``model``, or else the one that the configuration of the file's run names, or else the origin
    noted in the file.
    """
    run = next((run for run in (RunFolder(path), RunFolder(path.parent)) if run.config.is_file()), None)
    compact = run.compact if run is not None and run.path == path else saved_path(path)
    config = None if run is None else named_config(run, model=model)
    if not compact.is_file():
        raise ConfigError(
            "The argument must be the folder of a finished run (with compact.safetensors) or the .safetensors file of "
            f"a compact network. Got {path}. `softprune compact` cuts the network of an unfinished run; a dense run "
            "has none."
        )
    origin = read_origin(compact)
    # A module:factory is code of whoever wrote the file, and runs only when the user names it.
    known = origin.model if origin is not None and origin.model in models.REGISTRY else ""
    name = config.model.name if config is not None else model or known
    if not name:
        raise ConfigError(
            "A compact network outside its run needs --model, unless it was cut from one of softprune's own networks. "
            f"Got {path} without --model."
        )
    if not shape and origin is not None and origin.model == name:
        shape = origin.input_shape
    dense = _definition(name, compact, {} if config is None else config.model.options)
    example = torch.randn(1, *image_shape(name, shape), generator=torch.Generator().manual_seed(0))
    return OpenedNetwork(compact.resolve(), dense.eval(), load(compact, dense).float(), example)


def image_shape(name: str, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the shape of an image for a network: what is ``given``, or what the registry knows."""
    if not given and name not in models.REGISTRY:
        raise ConfigError(
            f"A network of your own needs the shape of an image, such as --input 3x224x224. Got {name!r} without it."
        )
    return given or models.REGISTRY[name].input_shape


def _definition(name: str, compact: Path, options: Mapping[str, Any]) -> nn.Module:
    """Build the dense network of a saved one, with the number of classes for which all shapes match."""
    plan = read_plans(compact)[0]
    # One of the first dimensions is that of the classifier, mostly the last one.
    lengths = [shape[0] for shape in plan.dense.values() if shape]
    for classes in dict.fromkeys(reversed(lengths)):
        with torch.device("meta"):  # which allocates no memory
            shapes = model_shapes(build_network(name, classes, options))
        if shapes == plan.dense:
            return build_network(name, classes, options)
    raise FileFormatError(
        f"The network must be the one that was pruned, a {plan.model}. Got {name!r}, whose shapes do not match "
        "the plan for any number of classes."
    )
