"""The decision as data: which inputs and outputs each module keeps. Versioned JSON, validated when read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from softprune.errors import PlanError

FORMAT = "softprune.plan"
VERSION = 1
KINDS = ("conv", "conv_transpose", "linear", "norm", "select")

Indices = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModuleCut:
    """What one module keeps. Indices count the dense module's channels."""

    kind: str
    width_in: int
    width_out: int
    inputs: Indices
    outputs: Indices
    groups: int = 1
    """Groups of the convolution after the cut."""
    select: Indices | None = None
    """Positions in the compact input tensor that this module reads; None: all of it, in order."""
    source_width: int = 0
    """Width of the compact input tensor, where `select` is given."""
    void: bool = False
    """The module computes nothing any more: it gives a constant."""
    folded: bool = False
    """Inputs that were constant moved into the bias (which the module has then)."""
    zeroed: Indices = ()
    """Outputs of a masked BatchNorm that stay for the shapes' sake, with scale and shift zero."""

    @property
    def changes(self) -> bool:
        """Whether the module is touched at all."""
        whole = len(self.inputs) == self.width_in and len(self.outputs) == self.width_out
        return not whole or self.select is not None or self.void or self.folded or bool(self.zeroed)


@dataclass(frozen=True, kw_only=True)
class ParameterCut:
    """What a parameter outside known modules keeps, along one dimension."""

    dim: int
    width: int
    kept: Indices


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """Which channels every module of one network keeps."""

    model: str
    """Class of the dense model."""
    dense: dict[str, tuple[int, ...]]
    """Parameter and buffer shapes of the dense model: a plan fits no other."""
    sites: dict[str, Indices]
    """Channels that each masked BatchNorm keeps by its mask."""
    modules: dict[str, ModuleCut]
    aliases: dict[str, str] = field(default_factory=dict)
    """Modules that share another module's weight -> that module."""
    parameters: dict[str, ParameterCut] = field(default_factory=dict)
    macs: int = 0
    dense_macs: int = 0
    """Multiply-accumulates of convolutions and linear layers per sample, after and before."""
    params: int = 0
    dense_params: int = 0
    floored: tuple[str, ...] = ()
    """Modules that keep one channel though nobody reads it, since emptying them is not possible."""

    constants: dict[str, NDArray[np.float64]] = field(default_factory=dict, compare=False, repr=False)
    """Constant inputs of layers that fold them, constant outputs of void ones, at the weights the plan was made
    for. Not stored: a saved network's weights have them folded already."""

    def to_json(self) -> str:
        """The plan as text; `from_json` reads it back."""
        body = asdict(replace(self, constants={}))
        del body["constants"]
        text = json.dumps(body, separators=(",", ":"), sort_keys=True)
        return json.dumps(
            {"format": FORMAT, "version": VERSION, "sha256": _digest(text), "plan": body},
            separators=(",", ":"),
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> PrunePlan:
        """Read a plan and check that it is one: format, version, checksum, types and ranges."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"a plan must be JSON. Got text that breaks at character {error.pos}: {error.msg}."
            ) from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlanError(f'a plan\'s "format" must be "{FORMAT}". Got {_shown(document)}.')
        if document.get("version") != VERSION:
            raise PlanError(
                f"this softprune reads plans of version {VERSION}. Got version {document.get('version')!r}; "
                "use the softprune that wrote it."
            )
        body = document.get("plan")
        if not isinstance(body, dict) or document.get("sha256") != _digest(
            json.dumps(body, separators=(",", ":"), sort_keys=True)
        ):
            raise PlanError(
                "the plan's content does not match its checksum: it was changed or damaged. Save it again."
            )
        try:
            return cls._from_body(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"the plan is malformed ({type(error).__name__}: {error}). Save it again."
            ) from error

    @classmethod
    def _from_body(cls, body: Mapping[str, Any]) -> PrunePlan:
        modules = {name: _module_cut(cut) for name, cut in body["modules"].items()}
        for name, cut in modules.items():
            _check(name, cut)
        return cls(
            model=str(body["model"]),
            dense={name: tuple(int(size) for size in shape) for name, shape in body["dense"].items()},
            sites={name: _indices(kept) for name, kept in body["sites"].items()},
            modules=modules,
            aliases={str(name): str(target) for name, target in body["aliases"].items()},
            parameters={
                name: ParameterCut(dim=int(cut["dim"]), width=int(cut["width"]), kept=_indices(cut["kept"]))
                for name, cut in body["parameters"].items()
            },
            macs=int(body["macs"]),
            dense_macs=int(body["dense_macs"]),
            params=int(body["params"]),
            dense_params=int(body["dense_params"]),
            floored=tuple(str(name) for name in body["floored"]),
        )

    def check_fits(self, model: nn.Module) -> None:
        """Raise a PlanError unless `model` is the dense model that this plan was made for."""
        # The module that defines a class may be called otherwise in another program (__main__, say).
        if type(model).__name__ != self.model.rpartition(".")[2]:
            raise PlanError(
                f"this plan is for {self.model}. Got a model of class {class_name(model)}; "
                "build the class it was made for."
            )
        shapes = model_shapes(model)
        for key in sorted(self.dense.keys() | shapes.keys()):
            if self.dense.get(key) != shapes.get(key):
                raise PlanError(
                    f"this plan is for a {self.model} whose '{key}' is {self.dense.get(key, 'absent')}. "
                    f"Got {shapes.get(key, 'absent')}; build the model with the arguments it was pruned with."
                )


def class_name(model: nn.Module) -> str:
    """The qualified class name that a plan records."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters and buffers: what a plan recognises its model by."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(document: object) -> str:
    return repr(document.get("format")) if isinstance(document, dict) else type(document).__name__


def _indices(values: Any) -> Indices:
    return tuple(int(value) for value in values)


def _module_cut(cut: Mapping[str, Any]) -> ModuleCut:
    return ModuleCut(
        kind=cut["kind"],
        width_in=int(cut["width_in"]),
        width_out=int(cut["width_out"]),
        inputs=_indices(cut["inputs"]),
        outputs=_indices(cut["outputs"]),
        groups=int(cut["groups"]),
        select=None if cut["select"] is None else _indices(cut["select"]),
        source_width=int(cut["source_width"]),
        void=bool(cut["void"]),
        folded=bool(cut["folded"]),
        zeroed=_indices(cut["zeroed"]),
    )


def _check(name: str, cut: ModuleCut) -> None:
    if cut.kind not in KINDS:
        raise ValueError(f"'{name}' is of unknown kind {cut.kind!r}")
    for label, kept, width in (("inputs", cut.inputs, cut.width_in), ("outputs", cut.outputs, cut.width_out)):
        if list(kept) != sorted(set(kept)) or (kept and not 0 <= kept[0] <= kept[-1] < width):
            raise ValueError(f"'{name}' keeps {label} that are not rising indices below {width}")
    if not cut.outputs:
        raise ValueError(f"'{name}' keeps no output")
    if cut.select is not None and (
        not cut.select or not 0 <= min(cut.select) <= max(cut.select) < cut.source_width
    ):
        raise ValueError(f"'{name}' selects outside its input of width {cut.source_width}")
