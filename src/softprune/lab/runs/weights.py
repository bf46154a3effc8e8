"""Weights of files and of runs, and their way into a network."""

import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from softprune.errors import ConfigError, FileFormatError, first_few, first_line
from softprune.io import read_bytes
from softprune.lab.runs.checkpoint import MOST_BYTES, load_tensors, read_newest, restoring
from softprune.lab.runs.folder import RunFolder
from softprune.log import get_logger

logger = get_logger(__name__)


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
    try:
        if path.suffix == ".safetensors":
            return dict(
                sorted(safetensors.torch.load(read_bytes(path, MOST_BYTES)).items())
            )  # load_file needs UTF-8 paths
        content = load_tensors(path)
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
