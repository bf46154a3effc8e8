"""A compact network on disk: one safetensors file with the plans and the origin in its metadata. Never pickle."""

import hashlib
import json
import math
import os
import reprlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from softprune.cut.apply import apply_plan, changed_since_the_cut, plans_of
from softprune.cut.plan import PrunePlan
from softprune.errors import ConfigError, FileFormatError, ModelError, PlanError
from softprune.graph import check_is_bare, check_is_module
from softprune.io import write_atomically

FORMAT = "softprune.compact"
VERSION = 1
SUFFIX = ".safetensors"
DOCUMENT = "softprune"
"""Metadata key: format, version, plans and origin as JSON text."""
CHECKSUM = "sha256"
"""Metadata key: the digest of the header without this key, and of all tensors."""
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
LARGEST_INPUT = 2**22
"""Numbers in the example of an origin, such as 3 x 1024 x 1024: a file must not choose how much memory is used."""
MOST_PLANS = 1000
"""Cuts of one network: each takes time when the file is read."""
_AGAIN = "Save or copy it again; `softprune compact RUN` writes that of a run."
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

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
    try:
        file = Path(os.fsdecode(os.fsencode(path)))
    except (TypeError, UnicodeError):  # no path, or characters that no file name has
        file = Path()
    if file.name in ("", "..") or "\0" in file.name:
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
    if not isinstance(origin, Origin | None):
        raise ConfigError(
            f"`origin` must be a softprune.cut.Origin or None. Got {reprlib.repr(origin)}; leave it out, or pass "
            "Origin(model=..., data=..., input_shape=...)."
        )
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
    target = saved_path(path)
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "plans": [json.loads(plan.to_json()) for plan in history],
    }
    if origin is not None:
        document["origin"] = asdict(origin)
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in _tensors(compact).items()}
    write_atomically(target, signed(tensors, document), then="save again", follow_link=True)
    return target


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
    header, content = _read(file, whole=True)
    metadata = header["__metadata__"]
    data = memoryview(content)[8 + int.from_bytes(content[:8], "little") :]
    if metadata.get(CHECKSUM) != _digest(header, data):
        raise FileFormatError(f"'{file}' does not match its checksum: it was truncated or changed. {_AGAIN}")
    plans = _plans(file, header)
    tensors = _unpack(file, content)
    compact: Model = model
    for plan in plans:
        compact = apply_plan(plan, compact)  # type: ignore[assignment]
    _check_tensors(compact, tensors)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    compact.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
    _tie_again(compact, model)
    return compact.eval()


def read_plans(path: str | os.PathLike[str]) -> list[PrunePlan]:
    """Return the plans of a saved network, in the order in which they cut it."""
    file = saved_path(path)
    return _plans(file, _read(file)[0])


def read_origin(path: str | os.PathLike[str]) -> Origin | None:
    """Return the origin noted in a saved network; None if there is none that makes sense.

    Raise a FileFormatError if its example would need more memory than a file may ask for.
    """
    file = saved_path(path)
    try:
        found = _document(file, _read(file)[0]).get("origin")
    except FileFormatError:
        return None
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("model", "data")):
        return None
    shape = found.get("input_shape")
    if not isinstance(shape, list) or len(shape) > 8 or not all(type(size) is int and size > 0 for size in shape):
        return None
    if math.prod(shape) > LARGEST_INPUT:
        raise FileFormatError(
            f"the example of a saved network can have at most {LARGEST_INPUT:,} numbers. Got {reprlib.repr(shape)} in "
            f"'{file}'; save the network again with the shape of one sample in its origin."
        )
    return Origin(found["model"], found["data"], tuple(shape))


def check_saved_shapes(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Raise unless the tensors of a saved network fit `model` cut by its plans; `model` may be on the meta device.

    It tells whether the dense definition is the right one before memory is allocated for it.
    """
    file = saved_path(path)
    for plan in read_plans(file):
        model = apply_plan(plan, model)
    _check_shapes(model.state_dict(), _unpack(file, _read(file, whole=True)[1]))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state of `model`, which must be tensors with data: a weights file holds nothing else."""
    state = model.state_dict()
    for name, entry in state.items():
        if not isinstance(entry, Tensor):
            path = name.rpartition(".")[0]
            place = f"'{path}' ({type(model.get_submodule(path)).__name__})" if path else "the model itself"
            raise ModelError(
                f"a saved network holds tensors only. Got a {type(entry).__name__} as '{name}' from {place}, whose "
                "get_extra_state() (or state_dict hook) cannot be stored; let it return a tensor, or nothing."
            )
        if entry.is_meta:
            raise ModelError(
                f"a saved network holds its weights. Got '{name}' on the meta device, which has no data; "
                "load the weights first."
            )
    return state


def _read(file: Path, *, whole: bool = False) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and the content of the file if `whole`."""
    try:
        if file.exists() and not file.is_file():  # opening a fifo would wait for ever
            raise FileFormatError(f"a saved network must be a file. Got '{file}', which is not a regular file.")
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= min(LARGEST_HEADER, os.fstat(stream.fileno()).st_size - 8):
                raise FileFormatError(
                    f"a saved network is a safetensors file. '{file}' has no complete header. {_AGAIN}"
                )
            text = stream.read(size)
            stream.seek(0)
            content = stream.read() if whole else b""
    except (OSError, UnicodeError) as error:
        reason, given = getattr(error, "strerror", None) or error, file.with_suffix("")
        hint = ""
        if given.is_dir():
            hint = f" '{given}' is a folder; pass the file in it, 'compact{SUFFIX}' for that of a run."
        elif given.is_file():
            hint = f" '{given}' is no file of softprune.save: their names end in {SUFFIX}."
        raise FileFormatError(
            f"a saved network must be a file that can be read. Got '{file}': {reason}.{hint}"
        ) from error
    header = _json(text, file)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get(DOCUMENT), str):
        raise FileFormatError(
            f"a saved network has its plans in its metadata. Got '{file}' without them: it holds plain weights, or "
            "another program wrote it."
        )
    return header, content


def _unpack(file: Path, content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file. The library would refuse a path that is no UTF-8."""
    try:
        return safetensors.torch.load(content)
    except Exception as error:  # SafetensorError, and KeyError for a dtype that torch does not have
        raise FileFormatError(f"'{file}' is not a readable safetensors file: {error}. {_AGAIN}") from error


def _digest(header: dict[str, Any], data: memoryview) -> str:
    """The checksum of everything in the file but the checksum itself."""
    metadata = {key: value for key, value in header["__metadata__"].items() if key != CHECKSUM}
    text = json.dumps({**header, "__metadata__": metadata}, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(text.encode())
    digest.update(data)
    return digest.hexdigest()


def _json(text: str | bytes, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
        json.dumps([[[found]]])  # writing needs a deeper stack than reading, and a part is written again later
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise FileFormatError(f"the header of a saved network must be JSON. Got '{file}': {error}. {_AGAIN}") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"'{file}' is not a softprune network. {_AGAIN}")
    return found


def _document(file: Path, header: dict[str, Any]) -> dict[str, Any]:
    document = _json(header["__metadata__"][DOCUMENT], file)
    if document.get("format") != FORMAT:
        raise FileFormatError(f'\'{file}\' is not a softprune network. Its "format" must be "{FORMAT}".')
    if document.get("version") != VERSION:
        raise FileFormatError(
            f"this softprune reads networks of version {VERSION}. Got version {document.get('version')!r} in '{file}'; "
            "use the softprune that wrote it."
        )
    return document


def _plans(file: Path, header: dict[str, Any]) -> list[PrunePlan]:
    plans = _document(file, header).get("plans")
    if not isinstance(plans, list) or not plans:
        raise FileFormatError(f"'{file}' has no plans in its metadata. {_AGAIN}")
    if len(plans) > MOST_PLANS:
        raise FileFormatError(
            f"a saved network can have at most {MOST_PLANS:,} plans. Got {len(plans):,} in '{file}'; save it again."
        )
    return [PrunePlan.from_json(json.dumps(plan)) for plan in plans]


def _check_tensors(compact: nn.Module, tensors: dict[str, Tensor]) -> None:
    state = _tensors(compact)
    _check_shapes(state, tensors)
    for name, expected in state.items():
        got = tensors[name].dtype
        if got != expected.dtype and not (got in _FLOATS and expected.dtype in _FLOATS):
            raise FileFormatError(
                f"the weights must have the dtypes of the network: '{name}' is {expected.dtype}, for which any of "
                f"float16, bfloat16, float32 and float64 may stand. Got {got}; save the network in one of these."
                if expected.dtype in _FLOATS
                else f"the weights must have the dtypes of the network: '{name}' is {expected.dtype}. Got {got}; save "
                "the network again."
            )


def _check_shapes(state: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    expected, got = ({name: tuple(each.shape) for name, each in found.items()} for found in (state, tensors))
    for name in sorted(expected.keys() | got.keys()):
        if expected.get(name) != got.get(name):
            raise FileFormatError(
                f"the weights must fit the plan. '{name}' should be {expected.get(name, 'absent')}; "
                f"got {got.get(name, 'absent')}. Save the network again."
            )


def _tie_again(compact: nn.Module, model: nn.Module) -> None:
    """Parameters that the dense definition shares between modules are shared again, unless a cut made them differ."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            path, _, attribute = name.rpartition(".")
            try:
                shared, own = compact.get_parameter(original), compact.get_parameter(name)
            except AttributeError:
                continue  # cut away
            if torch.equal(shared, own):
                compact.get_submodule(path)._parameters[attribute] = shared
