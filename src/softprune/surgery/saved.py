"""A compact network on disk: a folder with weights.safetensors and plan.json. Never pickle."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from softprune.errors import FileFormatError, ModelError, PlanError
from softprune.graph import check_is_module
from softprune.io import reading_folder, write_folder
from softprune.plan import PrunePlan
from softprune.surgery.apply import apply_plan, changed_since_the_cut, plans_of

FORMAT = "softprune.compact"
VERSION = 1
WEIGHTS = "weights.safetensors"
PLAN = "plan.json"

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Origin:
    """What a compact network was made of, for those who find its folder."""

    model: str
    """The dense network, as recipes name it."""
    data: str
    """The data set that it was trained on."""
    input_shape: tuple[int, ...]
    """Of one sample."""


def save(compact: nn.Module, folder: str | os.PathLike[str], *, origin: Origin | None = None) -> Path:
    """Write a compact network as `folder`/weights.safetensors and `folder`/plan.json.

    An earlier one is replaced. Whatever happens meanwhile (a full disk, a kill, a power cut), `load` of that name gives
    the earlier network or this one, whole. The name itself may be missing after a kill, if that came between the two
    renames of a replacement; the next `load` or `save` puts the earlier folder back from `.NAME.old.*` beside it. Of
    several processes that save under one name at once, the last one's network stays. `origin` is noted in plan.json.
    """
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
    target = Path(folder)
    weights = safetensors.torch.save(
        {name: _storable(tensor) for name, tensor in _tensors(compact).items()}, metadata={"format": "pt"}
    )
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "plans": [json.loads(plan.to_json()) for plan in history],
    }
    if origin is not None:
        document["origin"] = asdict(origin)
    plan = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(
            f"the folder of a compact network must be one that can be made. Got {error} for {target}; nothing was "
            "written. Name another."
        ) from error
    try:
        with reading_folder(target):
            _check_replaceable(target)
        write_folder(target, {WEIGHTS: weights, PLAN: plan})
    except OSError as error:
        raise FileFormatError(
            f"the folder of a compact network must be writable and its disk must have room. Got {error} at {target}, "
            f"with {shutil.disk_usage(target.parent).free / 2**20:.1f} MiB free; nothing that was there is lost. Make "
            "room, or name another folder, and save again."
        ) from error
    return target


def load(folder: str | os.PathLike[str], model: Model) -> Model:
    """The compact network of `folder`, rebuilt from the dense definition `model` (which stays as it is).

    A folder that a killed `save` had set aside is put back first.

    `model` must be of the class, and built with the arguments, of the network that was pruned; its weights do not
    matter. The result is on `model`'s device, in the saved dtype, and in eval mode.
    """
    check_is_module(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"`load` puts the weights on the device of `model`. Got '{name}' on the meta device, which holds no "
                "data; build the model on a real device, or call model.to_empty(device=...) first (buffers that a "
                "state_dict leaves out need their values then)."
            )
    plans, tensors = _read(Path(folder))
    compact: Model = model
    for plan in plans:
        compact = apply_plan(plan, compact)  # type: ignore[assignment]
    _check_tensors(compact, tensors)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    compact.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
    _tie_again(compact, model)
    return compact.eval()


def read_plans(folder: str | os.PathLike[str]) -> list[PrunePlan]:
    """The plans of a saved network, in the order in which they cut it."""
    with _reading(Path(folder)):
        return _read_plans(Path(folder))[0]


def read_origin(folder: str | os.PathLike[str]) -> Origin | None:
    """What the folder says of its origin; None if it says nothing. It is a note, not checked against anything."""
    try:
        with reading_folder(Path(folder)):
            found = json.loads((Path(folder) / PLAN).read_text()).get("origin")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("model", "data")):
        return None
    shape = found.get("input_shape")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
        return None
    return Origin(found["model"], found["data"], tuple(shape))


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


def _storable(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise FileFormatError(
            f"a saved network is a folder with {WEIGHTS} and {PLAN}. Got no readable '{path}': {error.strerror}."
        ) from error


def _check_replaceable(target: Path) -> None:
    if not target.exists() or (target / PLAN).exists():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise FileFormatError(
            f"`save` replaces only folders that softprune wrote. Got '{target}'; choose another name."
        )


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        with reading_folder(folder):
            yield
    except OSError as error:
        raise FileFormatError(
            f"a saved network that was being replaced must be put back before it is read. Got {error}; rename the "
            f"folder in '.{folder.name}.old.*' beside it to '{folder}'."
        ) from error


def _read(folder: Path) -> tuple[list[PrunePlan], dict[str, Tensor]]:
    """The plans and the weights, of one and the same network."""
    with _reading(folder):
        plans, digest = _read_plans(folder)
        if _sha256(folder / WEIGHTS) != digest:
            raise FileFormatError(
                f"'{folder / WEIGHTS}' does not match the checksum in {PLAN}: it was truncated, changed, or belongs to "
                "another network. Save or copy the folder again."
            )
        try:
            return plans, safetensors.torch.load_file(folder / WEIGHTS)
        except (safetensors.SafetensorError, OSError) as error:
            raise FileFormatError(
                f"'{folder / WEIGHTS}' is not a readable safetensors file: {error}."
            ) from error


def _read_plans(folder: Path) -> tuple[list[PrunePlan], str]:
    path = folder / PLAN
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise FileFormatError(
            f"a saved network is a folder with {WEIGHTS} and {PLAN}. Got no readable '{path}': {error.strerror}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileFormatError(
            f"'{path}' is not whole JSON ({error}). Save or copy the folder again."
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileFormatError(f'\'{path}\' is not a softprune network. Its "format" must be "{FORMAT}".')
    if document.get("version") != VERSION:
        raise FileFormatError(
            f"this softprune reads networks of version {VERSION}. Got version {document.get('version')!r} in '{path}'."
        )
    plans, digest = document.get("plans"), document.get("weights_sha256")
    if not isinstance(plans, list) or not plans or not isinstance(digest, str):
        raise FileFormatError(
            f"'{path}' lacks its plans or the checksum of the weights. Save or copy it again."
        )
    try:
        texts = [json.dumps(plan) for plan in plans]
    except RecursionError as error:
        raise FileFormatError(f"'{path}' is nested deeper than any plan. Save or copy it again.") from error
    return [PrunePlan.from_json(text) for text in texts], digest


def _check_tensors(compact: nn.Module, tensors: dict[str, Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in _tensors(compact).items()}
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | got.keys()):
        if expected.get(name) != got.get(name):
            raise FileFormatError(
                f"the weights must fit the plan. '{name}' should be {expected.get(name, 'absent')}; "
                f"got {got.get(name, 'absent')}. The folder mixes two networks; save it again."
            )


def _tie_again(compact: nn.Module, model: nn.Module) -> None:
    """Parameters that the dense definition shares between modules are shared again."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            path, _, attribute = name.rpartition(".")
            try:
                compact.get_submodule(path)._parameters[attribute] = compact.get_parameter(original)
            except AttributeError:
                continue  # cut away
