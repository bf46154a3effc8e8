"""Build the network of a run, from the registry or from user code, and load weights into it."""

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
"""Keys under which a file may store the state_dict."""


def build_network(name: str, num_classes: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the network ``name``: a registry name, or ``module:factory``, which is called with ``options``."""
    check_name("model.name", name, models.REGISTRY, options=options)
    if ":" not in name:
        return models.build(name, num_classes)
    return call_factory(name, "model.name", {"num_classes": num_classes, **(options or {})})


def named_config(folder: RunFolder, **names: str) -> RunConfig:
    """Return the configuration of a run, after checking that the user allows its user-defined code.

    A run's folder may come from someone else, and importing a ``module:factory`` of its config.toml runs code. It is
    therefore imported only if the command names it too. ``names`` are the command's --model, --data and --method.
    """
    config = folder.read_config()
    for key, given in names.items():
        own = config.setting(f"{key}.name")
        if given != own and (given or is_factory_name(own)):
            raise ConfigError(
                "A run is used with its own network, data and method, and code named in its config.toml is imported "
                f"only if the command names it too. Got {key}.name = {own!r} in {folder.config} and {given!r} in the "
                f"command; if you trust this code, add `--{key} {own}`."
            )
    return config


def check_outputs(network: nn.Module, data: DataBundle, what: str, remedy: str) -> None:
    """Raise a ConfigError unless the network maps images to one output per class, in training and eval mode."""
    example = data.example(2, next(network.parameters(), torch.empty(0)).device)
    for training in (False, True):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                found = copy.deepcopy(network).train(training)(example)
        except Exception as error:
            raise ConfigError(
                f"{what} must accept the images of the data set ({'x'.join(map(str, data.input_shape))}). Got "
                f"{type(error).__name__}: {error}; {remedy}."
            ) from error
        shape = tuple(found.shape) if isinstance(found, Tensor) else None
        if shape != (2, data.num_classes):
            raise ConfigError(
                f"{what} must return a tensor (batch, {data.num_classes}), one output per class, without auxiliary "
                f"heads. Got {shape or type(found).__name__} for 2 images in "
                f"{'training' if training else 'eval'} mode; {remedy}."
            )


def starting_network(config: ModelConfig, num_classes: int, seed: int) -> tuple[nn.Module, bool]:
    """Build the initial network of a run; return it and whether all of its weights are trained.

    With ``weights = "baseline"`` the network is initialised at random, since the baseline is not yet trained.
    """
    torch.manual_seed(seed)
    network = build_network(config.name, num_classes, config.options)
    if config.weights not in ("", BASELINE):
        path = Path(config.weights).expanduser()
        return network, load_weights(network, read_weights(path), str(path), num_classes)
    if config.pretrained:
        source = f"the pretrained weights of {config.name}"
        return network, load_weights(network, _pretrained_weights(config), source, num_classes)
    return network, False


def _pretrained_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return the pretrained weights of a torchvision or timm factory, including its original classifier."""
    keywords = inspect.signature(import_factory(config.name, "model.name")).parameters if ":" in config.name else {}
    # timm's factories accept both names through **kwargs, but declare only `pretrained`.
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
    """Copy weights into ``network``; return whether all of them match.

    If only the number of classes differs, the classifier keeps its random weights and a warning is logged. Any other
    mismatch raises a FileFormatError. ``source`` is the origin of ``state``, for messages.
    """
    expected = network.state_dict()
    heads = [f"{name}." for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    # A classifier for another number of classes differs in the first dimension only.
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
            f"The weights must match the network, a {type(network).__name__}. Got {source}: {error}. Check model.name "
            "and the number of classes; for a compact network, use `softprune.load` in Python."
        ) from error
    if head:
        logger.warning(
            "softprune: %s has a classifier for %d classes instead of %d, so these are initialised at random: %s",
            *(source, len(state[head[0]]), num_classes, ", ".join(head)),
        )
    return not head


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state_dict from a file, or from the newest checkpoint of a run."""
    if path.is_dir():
        state = read_newest(RunFolder.open(path).checkpoints)[1]
        if state["history"]["cuts"]:
            raise FileFormatError(
                f"model.weights must be those of a dense network. Got the run {path}, whose network has been cut."
            )
        return state["model"]
    raw = read_bytes(path, LARGEST_NETWORK)
    try:
        content: Any = safetensors.torch.load(raw) if path.suffix == ".safetensors" else load_tensors(raw)
        content = next((content[key] for key in _STATE_KEYS if key in content), content)
        if not all(isinstance(value, Tensor) for value in content.values()):
            raise TypeError("other values than tensors")
        return {name.removeprefix("module."): value for name, value in content.items()}
    except Exception as error:  # torch.load raises many kinds of errors, without a common class
        raise FileFormatError(
            "model.weights must be a .safetensors file, a PyTorch file with a state_dict (alone, or in a dictionary as "
            f"{', '.join(map(repr, _STATE_KEYS))}), or the folder of a run. Got {path}: "
            f"{first_line(error)}. Save model.state_dict() instead."
        ) from error


# --- compact networks ------------------------------------------------------------------------------------------------


class OpenedNetwork(NamedTuple):
    """A compact network and its file, the dense network (with random weights), and a batch of one random image."""

    path: Path
    dense: nn.Module
    compact: nn.Module
    example: Tensor


def open_compact(path: Path, model: str = "", shape: tuple[int, ...] = ()) -> OpenedNetwork:
    """Open the compact network of a run or of a file. The data set is not needed.

    The definition of the dense network is that of the run's configuration, if the file belongs to a run. Otherwise it
    is ``model``, or the built-in network that the file names as its origin.
    """
    run = next((run for run in (RunFolder(path), RunFolder(path.parent)) if run.config.is_file()), None)
    compact = run.compact if run is not None and run.path == path else saved_path(path)
    config = None if run is None else named_config(run, model=model)
    if not compact.is_file():
        raise ConfigError(
            "The argument must be the folder of a finished run (with compact.safetensors) or the .safetensors file of "
            f"a compact network. Got {path}. For an unfinished run, `softprune compact` writes it; a dense run has no "
            "compact network."
        )
    origin = read_origin(compact)
    # The file may come from someone else: import a module:factory only if the user names it.
    known = origin.model if origin is not None and origin.model in models.REGISTRY else ""
    name = config.model.name if config is not None else model or known
    if not name:
        raise ConfigError(
            "A compact network outside the folder of its run needs --model, unless it was cut from a built-in network. "
            f"Got {path} without --model."
        )
    if not shape and origin is not None and origin.model == name:
        shape = origin.input_shape
    dense = _definition(name, compact, {} if config is None else config.model.options)
    example = torch.randn(1, *image_shape(name, shape), generator=torch.Generator().manual_seed(0))
    return OpenedNetwork(compact.resolve(), dense.eval(), load(compact, dense).float(), example)


def image_shape(name: str, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the shape (C, H, W) of a network's input: ``given``, or else that in the registry."""
    if not given and name not in models.REGISTRY:
        raise ConfigError(
            f"A network that is not built in needs --input, such as --input 3x224x224. Got {name!r} without it."
        )
    return given or models.REGISTRY[name].input_shape


def _definition(name: str, compact: Path, options: Mapping[str, Any]) -> nn.Module:
    """Build the dense network of a saved compact one, trying numbers of classes until all shapes match."""
    plan = read_plans(compact)[0]
    # The number of classes is the first dimension of the classifier, usually the last tensor.
    lengths = [shape[0] for shape in plan.dense.values() if shape]
    for classes in dict.fromkeys(reversed(lengths)):
        with torch.device("meta"):  # without allocating memory
            shapes = model_shapes(build_network(name, classes, options))
        if shapes == plan.dense:
            return build_network(name, classes, options)
    raise FileFormatError(
        f"The network must be the one that was pruned, a {plan.model}. Got {name!r}, whose shapes do not match "
        "the plan with any number of classes."
    )
