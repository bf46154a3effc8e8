"""Save and load compact networks: a safetensors file with plans and origin in its metadata, without pickle."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from softprune.cut.apply import apply_plan, changed_since_the_cut, plans_of
from softprune.cut.plan import PrunePlan
from softprune.errors import FileFormatError, ModelError, PlanError
from softprune.graph import check_is_bare, check_is_module
from softprune.io import LARGEST_NETWORK, read_bytes, write_atomically

FORMAT = "softprune.compact"
VERSION = 1
SUFFIX = ".safetensors"
DOCUMENT = "softprune"
"""Metadata key of a JSON document with format, version, plans and origin."""
CHECKSUM = "sha256"
"""Metadata key of the checksum of all tensors and of the header without this key."""
_AGAIN = "Save or copy it again; for a run, use `softprune compact RUN`."

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Origin:
    """Origin of a compact network, stored in its file."""

    model: str
    """Name of the dense network, as in recipes."""
    data: str
    """Name of the training data set."""
    input_shape: tuple[int, ...]
    """Shape of a sample, without the batch dimension."""


def saved_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the file that `save` writes: `path`, with the suffix .safetensors added if missing."""
    file = Path(path) if isinstance(path, str | os.PathLike) else Path()
    if file.name in ("", ".."):
        raise FileFormatError(
            f"a saved network needs the path of a file. Got {path!r}; pass a path such as 'small{SUFFIX}'."
        )
    return file if file.suffix == SUFFIX else file.with_name(file.name + SUFFIX)


def save(compact: nn.Module, path: str | os.PathLike[str], *, origin: Origin | None = None) -> Path:
    """Save a compact network to a safetensors file and return its path.

    The suffix .safetensors is added if missing. The metadata contains the plans and `origin`, from which :func:`load`
    rebuilds the network. An existing file is replaced atomically: if the disk is full or the process is killed, the
    path holds either the earlier network or this one.
    """
    check_is_module(compact, "compact")
    check_is_bare(compact, "compact")
    history = plans_of(compact)
    if not history:
        raise PlanError(
            f"`save` needs a network cut by softprune. Got a {type(compact).__name__} without a plan; "
            "pass the result of pruner.compact() or softprune.load()."
        )
    changed = changed_since_the_cut(compact)
    if changed is not None:
        raise PlanError(
            "`save` needs a network that can be rebuilt from its class and its plan. Got one that was changed "
            f"after the cut: {changed}. Save it before the change (such as a new head) and repeat the change after "
            "`load`, or save its state_dict and rebuild it in code."
        )
    plans = [json.loads(plan.to_json()) for plan in history]
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION, "plans": plans}
    if origin is not None:
        document["origin"] = asdict(origin)
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in _tensors(compact).items()}
    file = saved_path(path)
    write_atomically(file, signed(tensors, document), then="save again", follow_link=True)
    return file


def signed(tensors: dict[str, Tensor], document: dict[str, Any]) -> bytes:
    """Return the content of a safetensors file with `document` and the checksum in its metadata."""
    metadata = {"format": "pt", DOCUMENT: json.dumps(document, separators=(",", ":"), sort_keys=True)}
    content = safetensors.torch.save(tensors, metadata=metadata)
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :]
    header["__metadata__"][CHECKSUM] = _digest(header, data)
    # safetensors writes the metadata in random order. Sort it, so that equal networks give equal files.
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns its data
    return b"".join((len(text).to_bytes(8, "little"), text, data))


def load(path: str | os.PathLike[str], model: Model) -> Model:
    """Load a saved compact network. `model` is its dense definition, which is not changed.

    `model` must have the class and the arguments of the network that was pruned, with any weights. The result is on the
    device of `model`, in the saved dtype and in eval mode. The suffix .safetensors is added to `path` if missing.
    """
    check_is_module(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"`load` puts the weights on the device of `model`. Got '{name}' on the meta device, which has no "
                "data; build the model on a real device, or call model.to_empty(device=...) first (non-persistent "
                "buffers then need values)."
            )
    file = saved_path(path)
    document, header, content = _read(file)
    data = memoryview(content)[8 + int.from_bytes(content[:8], "little") :]
    if header["__metadata__"].get(CHECKSUM) != _digest(header, data):
        raise FileFormatError(f"'{file}' does not match its checksum: it was truncated or changed. {_AGAIN}")
    compact: Model = model
    for plan in document["plans"]:
        compact = apply_plan(PrunePlan.from_json(json.dumps(plan)), compact)  # type: ignore[assignment]
    tensors = safetensors.torch.load(content)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    compact.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
    _tie_again(compact, model)
    return compact.eval()


def read_plans(path: str | os.PathLike[str]) -> list[PrunePlan]:
    """Return the plans of a saved network, in order of application."""
    document, _, _ = _read(saved_path(path))
    return [PrunePlan.from_json(json.dumps(plan)) for plan in document["plans"]]


def read_origin(path: str | os.PathLike[str]) -> Origin | None:
    """Return the origin in a saved network; None if there is none."""
    try:
        found = _read(saved_path(path))[0]["origin"]
        return Origin(str(found["model"]), str(found["data"]), tuple(map(int, found["input_shape"])))
    except (FileFormatError, KeyError, TypeError, ValueError):
        return None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of `model`; raise a ModelError unless it consists of tensors with data."""
    state = model.state_dict()
    for name, entry in state.items():
        if not isinstance(entry, Tensor) or entry.is_meta:
            owner = model.get_submodule(name.rpartition(".")[0])
            got = "a tensor on the meta device" if isinstance(entry, Tensor) else f"a {type(entry).__name__}"
            raise ModelError(
                f"a saved network can only contain tensors with data. Got {got} as '{name}' of a "
                f"{type(owner).__name__}; load the weights first, or let get_extra_state() return a tensor or nothing."
            )
    return state


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Return the document of a saved network, the header of the file, and its content."""
    content = read_bytes(file, LARGEST_NETWORK)
    size = int.from_bytes(content[:8], "little")
    if size > len(content) - 8:
        raise FileFormatError(f"'{file}' has no complete header of a safetensors file. {_AGAIN}")
    try:
        header = json.loads(content[8 : 8 + size])
        document = json.loads(header["__metadata__"][DOCUMENT])
        found, _ = (document["format"], document["version"]), document["plans"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(
            f"a saved network has its plans in its metadata. Got '{file}' without them: it is damaged, contains plain "
            "weights, or was written by another program."
        ) from error
    if found != (FORMAT, VERSION):
        raise FileFormatError(
            f"this softprune reads {FORMAT!r} of version {VERSION}. Got {found[0]!r} of version {found[1]!r} in "
            f"'{file}'; use the softprune that wrote it."
        )
    return document, header, content


def _digest(header: dict[str, Any], data: memoryview) -> str:
    """Return the checksum of the file without the checksum itself."""
    metadata = {key: value for key, value in header["__metadata__"].items() if key != CHECKSUM}
    text = json.dumps({**header, "__metadata__": metadata}, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(text.encode())
    digest.update(data)
    return digest.hexdigest()


def _tie_again(compact: nn.Module, model: nn.Module) -> None:
    """Restore the sharing of parameters between modules as in the dense definition, if they are still equal."""
    first: dict[int, str] = {}
    successors = dict(compact.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original == name or original not in successors or name not in successors:  # not shared, or removed
            continue
        if torch.equal(successors[original], successors[name]):
            path, _, attribute = name.rpartition(".")
            compact.get_submodule(path)._parameters[attribute] = successors[original]
