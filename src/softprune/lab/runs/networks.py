"""The network of a run: from the registry or the user's own module, with fresh or given weights."""

import copy
import inspect
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from softprune import models
from softprune.cut import Origin, saved_path
from softprune.errors import ConfigError, FileFormatError, first_few, first_line, storable
from softprune.io import LARGEST_NETWORK, read_bytes
from softprune.lab.config.settings import BASELINE, ModelConfig, RunConfig
from softprune.lab.data import DATASETS, ArrayDataset, DataBundle
from softprune.lab.factories import call_factory, check_name, import_factory
from softprune.lab.runs.checkpoint import load_tensors, read_newest, restoring
from softprune.lab.runs.folder import RunFolder, own_names
from softprune.lab.runs.result import Inputs
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


def check_outputs(network: nn.Module, data: DataBundle, what: str, remedy: str, *, training: bool = False) -> None:
    """Raise a ConfigError unless the network maps images of the data set to one number per class.

    With ``training`` it must also return one tensor in training. The network does not change.
    """
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
    if training:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                found = copy.deepcopy(network).train()(example)
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


# --- weights ---------------------------------------------------------------------------------------------------------


def load_weights(network: nn.Module, state: Mapping[str, Tensor], source: str, num_classes: int) -> bool:
    """Copy weights into ``network``; return whether all of them fit.

    A classifier that is missing, or for other classes, keeps its random start, with a warning. Anything else that does
    not fit is an error. ``source`` says where ``state`` is from, for messages.
    """
    expected = network.state_dict()
    classifiers = _classifiers(network, num_classes)
    heads = {name for names in classifiers for name in names}
    # Files of PyTorch before 0.4.1, and of some converters, have no counters of batches, or have them as floats.
    counters = {name: value for name, value in expected.items() if name.endswith("num_batches_tracked")}
    body = [name for name in expected if name not in counters and name not in heads]
    own = _own_part(state, body or [*expected], source)
    state = counters | {name: own[name] for name in own if name not in counters or not own[name].is_floating_point()}
    shared = [name for name in expected if name in state]
    wrong = [name for name in shared if state[name].shape != expected[name].shape]
    missing = [name for name in expected if name not in state]
    # A classifier for other classes differs in its first dimension alone.
    head = [n for n in wrong if n in heads and state[n].ndim and state[n].shape[1:] == expected[n].shape[1:]]
    head += missing if missing in classifiers[-1:] else []  # as in the file of a backbone
    problems = {
        "missing": missing,
        "unknown": [name for name in state if name not in expected],
        "of another shape": wrong,
        # Copying would round floating-point numbers.
        "of another dtype": [n for n in shared if state[n].is_floating_point() != expected[n].is_floating_point()],
    }
    if any(name not in head for names in problems.values() for name in names):
        parts = [f"{title}: {first_few(names)} ({len(names)})" for title, names in problems.items() if names]
        compact = " If they are of a compact network, use `softprune.load` in Python." if wrong else ""
        raise FileFormatError(
            f"The weights must be those of a {type(network).__name__} like this one. Got "
            f"{'; '.join([source, *parts])}. Check model.name and the number of classes.{compact}"
        )
    network.load_state_dict({**state, **{name: expected[name] for name in head}})
    if head:
        found = "no classifier:"
        if head[0] in state:
            found = f"a classifier for {len(state[head[0]])} classes instead of {num_classes}: not loaded, and"
        logger.warning("softprune: %s has %s initialised at random: %s", source, found, ", ".join(head))
    return not head


def _own_part(state: Mapping[str, Tensor], names: Collection[str], source: str) -> dict[str, Tensor]:
    """Return the part of a state_dict that has the ``names`` of a network, without what is put before them.

    DDP, torch.compile, averages of weights and modules that hold the network, such as a LightningModule, do so.
    """
    first = next(iter(names), "")
    found = [key.removesuffix(first) for key in state if f".{key}".endswith(f".{first}")]
    found = [prefix for prefix in found if all(prefix + name in state for name in names)]
    if len(found) > 1:
        raise FileFormatError(
            f"The weights must hold the network once. Got {source} with it under {first_few([*map(repr, found)])}; "
            "save the state_dict of the one that is meant."
        )
    if not found:  # the names as far as they can be told, for the message
        return {re.sub(r"^(_orig_mod\.)?(module\.)?(_orig_mod\.)?", "", name): value for name, value in state.items()}
    left = [name for name in state if not name.startswith(found[0]) and name != "n_averaged"]
    if left:
        logger.info("of %s only '%s' is used, not %s", source, found[0].removesuffix("."), first_few(left))
    return {name.removeprefix(found[0]): value for name, value in state.items() if name.startswith(found[0])}


def _classifiers(network: nn.Module, num_classes: int) -> list[list[str]]:
    """Return the names of the tensors of each layer that may be the classifier: one with as many outputs as classes."""
    layers = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    tensors = [{f"{name}.{key}": value for key, value in module.state_dict().items()} for name, module in layers]
    return [list(each) for each in tensors if all(value.shape[:1] == (num_classes,) for value in each.values())]


def check_weights_exist(path: Path) -> None:
    """Raise unless there is a file or the folder of a run at ``path``."""
    if not (path.is_file() or RunFolder(path).config.is_file()):
        problem = "is neither" if path.exists() else "does not exist"
        raise ConfigError(f"Weights must be a file or the folder of a run. Got {path}, which {problem}.")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state_dict from a file or from the newest checkpoint of a run."""
    check_weights_exist(path)
    if path.is_dir():
        state = read_newest(RunFolder(path).checkpoints)[1]
        with restoring():
            if state["history"]["cuts"]:
                raise FileFormatError(
                    f"model.weights must be of a dense network. Got the run {path}, whose network was cut in training."
                )
            return dict(state["model"])
    raw = read_bytes(path, LARGEST_NETWORK)
    try:
        if path.suffix == ".safetensors":
            return dict(sorted(safetensors.torch.load(raw).items()))
        content = load_tensors(raw)
    except (SafetensorError, RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise FileFormatError(
            f"model.weights must be readable. Got {path}: {first_line(error)}. Save or download the file again."
        ) from error
    except Exception as error:  # torch.load's refusals of unsafe pickles have no public common class
        raise FileFormatError(
            f"model.weights must hold tensors only, so that reading it runs no code. Got {path}, which is damaged "
            "or holds other objects, a whole module for example; save model.state_dict() instead."
        ) from error
    for _ in range(3):  # a dictionary may contain itself
        if not isinstance(content, dict) or _is_state(content):
            break
        states = [key for key, value in content.items() if _is_state(value) and value]
        usual = [key for key in ("state_dict", "model_state_dict", "model") if isinstance(content.get(key), dict)]
        if not usual and len(states) != 1:
            break
        key = (usual or states)[0]
        others = [str(each) for each in states if each != key]
        if others:  # an average of the weights, for example
            logger.warning("softprune: of %s only %r is used; to use %s, save it alone", path, key, first_few(others))
        content = content[key]
    if not _is_state(content):
        keys = f"the keys {first_few(sorted(map(str, content)))}" if isinstance(content, dict) else ""
        raise FileFormatError(
            "model.weights must hold one state_dict, alone or in a dictionary, or that of the network under "
            f"'state_dict', 'model_state_dict' or 'model'. Got {keys or type(content).__name__} in {path}."
        )
    return dict(content)


def _is_state(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    )
