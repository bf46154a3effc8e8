"""The network of a run: from the registry or the user's own module, with fresh or given weights."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from softprune import models
from softprune.config.settings import ModelConfig, RunConfig
from softprune.data import DataBundle
from softprune.errors import ConfigError, FileFormatError, nearest
from softprune.runs.checkpoint import read_newest
from softprune.runs.folder import RunFolder
from softprune.surgery import Origin, read_origin


def build_network(name: str, num_classes: int) -> nn.Module:
    """The network that ``name`` means: a registry name, or ``module:factory`` called with
    ``num_classes=``."""
    check_network_name(name)
    if ":" not in name:
        return models.build(name, num_classes)
    module_name, _, factory_name = name.partition(":")
    # A console script does not look in the current folder, where the user's module is.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.name = 'module:factory' must be importable from here. Got {name!r}: {error}."
        ) from error
    try:
        network = factory(num_classes=num_classes)
    except TypeError as error:
        raise ConfigError(
            f"The factory of model.name must take num_classes. Got {name!r}: {error}."
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"The factory of model.name must return an nn.Module. Got {type(network).__name__} from {name!r}."
        )
    return network


def check_network_name(name: str) -> None:
    """Raise a ConfigError unless ``name`` is in the registry or reads as ``module:factory``; imports nothing."""
    module, colon, factory = name.partition(":")
    if name in models.REGISTRY or (colon and factory and "/" not in name and all(module.split("."))):
        return
    raise ConfigError(
        f"model.name must be one of {', '.join(models.REGISTRY)}, or module:factory of your own. Got {name!r}."
        f"{nearest(name, models.REGISTRY)}"
    )


def origin_of(config: RunConfig, data: DataBundle) -> Origin:
    """Return the origin that a run stores in its compact networks."""
    return Origin(config.model.name, config.data.name, data.input_shape)


def known_origin(compact: Path) -> Origin | None:
    """Return the origin of a saved network if it names a network of the registry, else None.

    A `module:factory` is code of whoever wrote the file, and runs only when the user names it.
    """
    origin = read_origin(compact)
    return origin if origin is not None and origin.model in models.REGISTRY else None


def initial_network(config: ModelConfig, num_classes: int, seed: int) -> nn.Module:
    """The network that a run starts from: drawn from ``seed``, then overwritten by ``config.weights`` if
    given."""
    torch.manual_seed(seed)
    network = build_network(config.name, num_classes)
    if config.weights:
        load_weights(network, Path(config.weights).expanduser())
    return network


def load_weights(network: nn.Module, path: Path) -> None:
    """Copy the weights in ``path`` into ``network``; a classifier for other classes is an error, not a
    guess."""
    state = _read_weights(path)
    expected = network.state_dict()
    missing = [name for name in expected if name not in state]
    extra = [name for name in state if name not in expected]
    wrong = [name for name in expected if name in state and state[name].shape != expected[name].shape]
    if missing or extra or wrong:
        parts = [
            f"{title}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} ({len(names)})"
            for title, names in (("missing", missing), ("unknown", extra), ("of another shape", wrong))
            if names
        ]
        raise FileFormatError(
            f"The weights must be those of a {type(network).__name__} like this one. Got {path} with "
            f"{'; '.join(parts)}. Check model.name and the number of classes."
        )
    network.load_state_dict(state)


def check_weights_exist(path: Path) -> None:
    """Raise unless there is something at ``path``."""
    if not path.exists():
        raise ConfigError(
            f"model.weights must be a file or the folder of a run. Got {path}, which does not exist."
        )


def _read_weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        state = read_newest(RunFolder.open(path).checkpoints)[1]
        if state["cuts"]:
            raise FileFormatError(
                f"model.weights must be of a dense network. Got the run {path}, whose network was cut in "
                "training."
            )
        return state["model"]
    check_weights_exist(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise FileFormatError(f"model.weights must be readable. Got {path}: {error}") from error
    except Exception as error:  # torch.load's refusals of unsafe pickles have no public common class
        raise FileFormatError(
            "model.weights must hold tensors only (a state_dict), so that reading it runs no code. Got "
            f"{path}: {error}"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise FileFormatError(
            f"model.weights must hold a state_dict. Got {type(content).__name__} in {path}."
        )
    return {name.removeprefix("module."): value for name, value in content.items()}
