"""The plan: which inputs and outputs each module keeps. Versioned JSON, validated when read."""

from __future__ import annotations

import hashlib
import json
import reprlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError, create_model
from torch import Tensor, nn

from softprune.cut.cuts import Count, Indices, ModuleCut, ParameterCut, Shapes, check_cuts, is_of_kind
from softprune.errors import PlanError

FORMAT = "softprune.plan"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """Which channels every module of one network keeps."""

    model: str
    """Class of the dense model."""
    dense: Shapes
    """Parameter and buffer shapes of the dense model: a plan fits no other."""
    sites: dict[str, Indices]
    """Channels that each masked BatchNorm keeps by its mask."""
    modules: dict[str, ModuleCut]
    aliases: dict[str, str] = field(default_factory=dict)
    """Modules that share another module's weight -> that module."""
    parameters: dict[str, ParameterCut] = field(default_factory=dict)
    macs: Count = 0
    dense_macs: Count = 0
    """Multiply-accumulates of convolutions and linear layers per sample, after and before."""
    params: Count = 0
    dense_params: Count = 0
    floored: tuple[str, ...] = ()
    """Modules that keep one channel although nothing reads it, since a module cannot be empty."""
    constants: dict[str, NDArray[np.float64]] = field(default_factory=dict, compare=False, repr=False)
    """Constant inputs of layers that fold them, constant outputs of void layers, at the weights the plan was made for.
    Not stored: in the weights of a saved network they are folded already."""

    def masks(self) -> dict[str, Tensor]:
        """Return the hard mask of every masked BatchNorm, True where a channel is kept."""
        masks = {}
        for name, kept in self.sites.items():
            masks[name] = torch.zeros(self.modules[name].width_out, dtype=torch.bool)
            masks[name][list(kept)] = True
        return masks

    def to_json(self) -> str:
        """Return the plan as text; :meth:`from_json` reads it."""
        body = asdict(replace(self, constants={}))
        del body["constants"]
        digest = _digest(_compact_json(body))
        return _compact_json({"format": FORMAT, "version": VERSION, "sha256": digest, "plan": body})

    @classmethod
    def from_json(cls, text: str) -> PrunePlan:
        """Read a plan and check its format, version, checksum, types and ranges."""
        if not isinstance(text, str):
            raise PlanError(f"`from_json` takes a string. Got {type(text).__name__}; pass what to_json() returned.")
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"a plan must be JSON. Got text that breaks at character {error.pos}: {error.msg}."
            ) from error
        except (ValueError, RecursionError) as error:
            # A number of thousands of digits, or thousands of brackets.
            raise PlanError(f"a plan must be JSON that softprune wrote. Got text that breaks: {error}.") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlanError(f'a plan\'s "format" must be "{FORMAT}". Got {_shown(document)}.')
        if document.get("version") != VERSION:
            raise PlanError(
                f"this softprune reads plans of version {VERSION}. Got version {document.get('version')!r}; "
                "use the softprune that wrote it."
            )
        body = document.get("plan")
        try:
            content = _compact_json(body)
        except RecursionError:  # writing needs a deeper stack than reading did
            content = ""
        if not isinstance(body, dict) or not content or document.get("sha256") != _digest(content):
            raise PlanError("the plan's content does not match its checksum: it was changed or damaged. Save it again.")
        try:
            plan = cls(**dict(_Body.model_validate_json(content, strict=True)))
            check_cuts(plan.dense, plan.sites, plan.modules, plan.aliases, plan.parameters)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            rule = f"'{'.'.join(map(str, first['loc']))}' {first['msg'].replace('Input should', 'must')}"
            got = reprlib.repr(first["input"])
            raise PlanError(f"the plan is malformed ({rule}, got {got}). Save it again.") from error
        except ValueError as error:
            raise PlanError(f"the plan is malformed ({error}). Save it again.") from error
        return plan

    def check_fits(self, model: nn.Module) -> None:
        """Raise a PlanError unless `model` is the dense model that this plan was made for."""
        # The module that defines a class may have another name in another program, such as __main__.
        if type(model).__qualname__.rpartition(".")[2] != self.model.rpartition(".")[2]:
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
        self._check_modules(model)

    def _check_modules(self, model: nn.Module) -> None:
        """Raise unless each name is a module of the kind that the plan cuts, and no module has two names."""
        found = dict(model.named_modules(remove_duplicate=False))
        names: dict[int, str] = {}
        for name, target in {**{name: name for name in self.modules}, **self.aliases}.items():
            module, cut = found.get(name), self.modules.get(target)
            if module is None or cut is None or not is_of_kind(module, cut):
                got = "no such module" if module is None else f"a {type(module).__name__}"
                wanted = f"the module '{target}'" if cut is None else f"a module of kind {cut.kind!r}"
                raise PlanError(
                    f"this plan cuts '{name}' as {wanted}. Got {got} in {class_name(model)}; "
                    "use the plan of this network."
                )
            first = names.setdefault(id(module), name)
            if first != name:
                raise PlanError(
                    f"a plan must cut each module once. Got '{first}' and '{name}', which are one module of "
                    f"{class_name(model)}; use the plan of this network."
                )


_FIELDS: dict[str, Any] = {name: (hint, ...) for name, hint in get_type_hints(PrunePlan, include_extras=True).items()}
del _FIELDS["constants"]
_Body = create_model("_Body", **_FIELDS)
"""The fields of a plan in its file."""


def class_name(model: nn.Module) -> str:
    """Return the qualified class name that a plan records."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all parameters and buffers, by which a plan recognises its model."""
    shapes: dict[str, tuple[int, ...]] = {}
    waiting = [("", model)]
    while waiting:  # named_parameters() takes several times as long, and every plan asks
        prefix, module = waiting.pop()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                shapes[prefix + name] = tuple(tensor.shape)
        waiting += [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
    return shapes


def _compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(document: object) -> str:
    return repr(document.get("format")) if isinstance(document, dict) else type(document).__name__
