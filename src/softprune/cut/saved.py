"""A compact network on disk: one safetensors file with the plans and the origin in its metadata. Never pickle."""

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
"""Metadata key: format, version, plans and origin as JSON text."""
CHECKSUM = "sha256"
"""Metadata key: the digest of the header without this key, and of all tensors."""
_AGAIN = "Save or copy it again; `softprune compact RUN` writes that of a run."

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Origin:
    """Where a compact network comes from; stored in its file."""

    model: str
    """The dense network, as recipes name it."""
    data: str
    """The data set it was trained on."""
    input_shape: tuple[int, ...]
    """The shape of one sample."""


def saved_path(path: str | os.PathLike[str]) -> Path:
    """Return the file that `save` writes for `path`: the suffix .safetensors is added where it is missing."""
    file = Path(path) if isinstance(path, str | os.PathLike) else Path()
    if file.name in ("", ".."):
        raise FileFormatError(
            f"a saved network needs the path of a file. Got {path!r}; pass one such as 'small{SUFFIX}'."
        )
    return file if file.suffix == SUFFIX else file.with_name(file.name + SUFFIX)


def save(compact: nn.Module, path: str | os.PathLike[str], *, origin: Origin | None = None) -> Path:
    """Write a compact network to one safetensors file and return its path.

    The suffix .safetensors is added to a path without it. The plans and `origin` are in the file's metadata, so that
    :func:`load` rebuilds the network from its dense definition. An existing file is replaced in one step: after a full
    disk, a kill or a power cut the path holds the earlier network or this one, complete.
    """
    check_is_module(compact, "compact")
    check_is_bare(compact, "compact")
    history = plans_of(compact)
    if not history:
        raise PlanError(
            f"`save` writes networks that softprune cut. Got a {type(compact).__name__} without a plan; "
            "pass what pruner.compact() or softprune.load() returned."
        )
    changed = changed_since_the_cut(compact)
    if changed is not None:
        raise PlanError(
            "`save` writes networks that can be rebuilt from their class and their plan. Got one that was changed "
            f"after the cut: {changed}. Save it before you change it (a new head, say) and change it again after "
            "`load`, or keep its state_dict beside code that rebuilds it."
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
    # safetensors writes the metadata in no fixed order; equal networks give equal files.
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns its data
    return b"".join((len(text).to_bytes(8, "little"), text, data))


def load(path: str | os.PathLike[str], model: Model) -> Model:
    """Rebuild the compact network of a saved file from its dense definition `model`, which is left unchanged.

    `model` must be of the class, and built with the arguments, of the network that was pruned; its weights do not
    matter. The result is on `model`'s device, in the saved dtype, and in eval mode. The suffix .safetensors is added
    to a path without it.
    """
    check_is_module(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"`load` puts the weights on the device of `model`. Got '{name}' on the meta device, which holds no "
                "data; build the model on a real device, or call model.to_empty(device=...) first (buffers that a "
                "state_dict leaves out need their values then)."
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
    """Return the plans of a saved network, in the order in which they cut it."""
    document, _, _ = _read(saved_path(path))
    return [PrunePlan.from_json(json.dumps(plan)) for plan in document["plans"]]


def read_origin(path: str | os.PathLike[str]) -> Origin | None:
    """Return the origin noted in a saved network; None if there is none."""
    try:
        found = _read(saved_path(path))[0]["origin"]
        return Origin(str(found["model"]), str(found["data"]), tuple(map(int, found["input_shape"])))
    except (FileFormatError, KeyError, TypeError, ValueError):
        return None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of `model`, which must be tensors with data: a weights file holds nothing else."""
    state = model.state_dict()
    for name, entry in state.items():
        if not isinstance(entry, Tensor) or entry.is_meta:
            owner = model.get_submodule(name.rpartition(".")[0])
            got = "a tensor on the meta device" if isinstance(entry, Tensor) else f"a {type(entry).__name__}"
            raise ModelError(
                f"a saved network holds tensors with values only. Got {got} as '{name}' of a {type(owner).__name__}; "
                "load the weights first, or let get_extra_state() return a tensor or nothing."
            )
    return state


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Return the document of a saved network, the header that it is in, and the content of the file."""
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
            f"a saved network has its plans in its metadata. Got '{file}' without them: it was damaged, holds plain "
            "weights, or another program wrote it."
        ) from error
    if found != (FORMAT, VERSION):
        raise FileFormatError(
            f"this softprune reads {FORMAT!r} of version {VERSION}. Got {found[0]!r} of version {found[1]!r} in "
            f"'{file}'; use the softprune that wrote it."
        )
    return document, header, content


def _digest(header: dict[str, Any], data: memoryview) -> str:
    """Return the checksum of everything in the file but the checksum itself."""
    metadata = {key: value for key, value in header["__metadata__"].items() if key != CHECKSUM}
    text = json.dumps({**header, "__metadata__": metadata}, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(text.encode())
    digest.update(data)
    return digest.hexdigest()


def _tie_again(compact: nn.Module, model: nn.Module) -> None:
    """Share again the parameters that the dense definition shares between modules, unless a cut made them differ."""
    first: dict[int, str] = {}
    successors = dict(compact.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original == name or original not in successors or name not in successors:  # the only one, or cut away
            continue
        if torch.equal(successors[original], successors[name]):
            path, _, attribute = name.rpartition(".")
            compact.get_submodule(path)._parameters[attribute] = successors[original]
