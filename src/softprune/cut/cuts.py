"""What one module or parameter keeps, and the checks of what was read from a file.

A damaged plan is refused by the name of the module: ranges, kinds, and agreement with the dense shapes.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from softprune.graph.modules import ConstantOutput, Select

Count = Annotated[int, Ge(0), Lt(2**63)]
Indices = tuple[Annotated[int, Ge(-(2**63)), Lt(2**63)], ...]
Shapes = dict[str, Indices]


@dataclass(frozen=True, kw_only=True)
class ModuleCut:
    """What one module keeps. Indices count the dense module's channels."""

    kind: str
    width_in: Count
    width_out: Count
    inputs: Indices
    outputs: Indices
    groups: Count = 1
    """Groups of the convolution after the cut."""
    select: Indices | None = None
    """Positions in the compact input tensor that this module reads; None: all of it, in order."""
    source_width: Count = 0
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

    dim: Count
    width: Count
    kept: Indices


KINDS: dict[str, type[nn.Module]] = {
    "conv": _ConvNd,
    "conv_transpose": _ConvTransposeNd,
    "linear": nn.Linear,
    "norm": _NormBase,
    "select": Select,
    "source": ConstantOutput,
}


def check_cuts(
    dense: Shapes,
    sites: Mapping[str, Indices],
    modules: Mapping[str, ModuleCut],
    aliases: Mapping[str, str],
    parameters: Mapping[str, ParameterCut],
) -> None:
    """Raise a ValueError unless everything is in range and agrees with the dense shapes."""
    tensors: defaultdict[str, Shapes] = defaultdict(dict)
    for key, shape in dense.items():
        path, _, attribute = key.rpartition(".")
        tensors[path][attribute] = shape
    for name, cut in modules.items():
        _check(name, cut)
        _check_select(name, cut)
        _check_shapes(name, cut, tensors[name])
    for name, target in aliases.items():
        if name in modules or target not in modules:
            raise ValueError(f"'{name}' must be an alias of a module in the plan, got '{target}'")
        _check_shapes(name, modules[target], tensors[name])
    for name, kept in sites.items():
        site = modules.get(name)
        if site is None or site.kind != "norm":
            raise ValueError(f"the site '{name}' is no BatchNorm in the plan")
        if not _rise_below(kept, site.width_out):
            raise ValueError(f"the site '{name}' keeps channels that are not increasing indices below {site.width_out}")
    for name, parameter in parameters.items():
        shape = dense.get(name, ())
        if parameter.dim >= len(shape) or shape[parameter.dim] != parameter.width:
            raise ValueError(
                f"the parameter '{name}' is cut along dimension {parameter.dim} of width {parameter.width}, "
                f"but the dense shapes say {shape or 'that there is none'}"
            )
        if not parameter.kept or not _rise_below(parameter.kept, parameter.width):
            raise ValueError(f"the parameter '{name}' keeps what is not increasing indices below {parameter.width}")
        path, _, attribute = name.rpartition(".")
        owner = modules.get(aliases.get(path, path))
        if owner is not None and (owner.kind == "norm" or attribute in ("weight", "bias")):
            raise ValueError(f"the parameter '{name}' is cut twice, by itself and with its module")


def _rise_below(kept: Indices, width: int) -> bool:
    return list(kept) == sorted(set(kept)) and (not kept or 0 <= kept[0] <= kept[-1] < width)


def _check(name: str, cut: ModuleCut) -> None:
    if cut.kind not in KINDS:
        raise ValueError(f"'{name}' is of unknown kind {cut.kind!r}")
    for label, kept, width in (
        ("inputs", cut.inputs, cut.width_in),
        ("outputs", cut.outputs, cut.width_out),
        ("zeroed outputs", cut.zeroed, len(cut.outputs)),
    ):
        if not _rise_below(kept, width):
            raise ValueError(f"'{name}' keeps {label} that are not increasing indices below {width}")
    if not cut.outputs:
        raise ValueError(f"'{name}' keeps no output")
    if not cut.inputs and not cut.void and cut.kind != "select":
        raise ValueError(f"'{name}' keeps no input, which only a void module may")
    if cut.kind in ("norm", "source") and cut.inputs != cut.outputs:
        raise ValueError(f"'{name}' is of kind {cut.kind!r}, whose inputs and outputs must be the same")
    if cut.kind != "norm" and cut.zeroed:
        raise ValueError(f"'{name}' has zeroed outputs, which only BatchNorms have")
    if cut.kind in ("norm", "select", "source") and (cut.void or cut.folded):
        raise ValueError(f"'{name}' is void or folded, which only convolutions and linear layers can be")
    if cut.groups < 1 or len(cut.inputs) % cut.groups or len(cut.outputs) % cut.groups:
        raise ValueError(
            f"'{name}' has {cut.groups} groups, which must be at least 1 and divide its "
            f"{len(cut.inputs)} inputs and {len(cut.outputs)} outputs"
        )


def _check_select(name: str, cut: ModuleCut) -> None:
    if cut.select is None:
        if cut.kind == "select":
            raise ValueError(f"'{name}' is of kind 'select' and selects nothing")
        return
    if not cut.select or not 0 <= min(cut.select) <= max(cut.select) < cut.source_width:
        raise ValueError(f"'{name}' selects outside its input of width {cut.source_width}")
    # A layer selects what it reads; a Select has the channels that come as inputs, and gives those it selects.
    count, most = (cut.outputs, cut.inputs) if cut.kind == "select" else (cut.inputs, range(cut.width_in))
    if len(cut.select) != len(count) or cut.source_width > len(most):
        raise ValueError(
            f"'{name}' selects {len(cut.select)} of {cut.source_width} channels, "
            f"but keeps {len(count)} of at most {len(most)}"
        )


def _check_shapes(name: str, cut: ModuleCut, own: Shapes) -> None:
    """The widths must be those of the dense module's own tensors."""
    if cut.kind == "norm":
        affine = all(len(own.get(attribute, ())) == 1 for attribute in ("weight", "bias"))
        widths = {shape[0] for shape in own.values() if shape}
        fits = cut.width_in == cut.width_out and widths <= {cut.width_out} and (affine or not cut.zeroed)
    elif cut.kind == "select":
        fits = own.get("index") == (cut.width_out,)
    elif cut.kind == "source":
        fits = own.get("value") == (cut.width_out,) == (cut.width_in,) and cut.select is None
    else:
        fits = _weight_fits(cut, own.get("weight", ()))
    if not fits:
        raise ValueError(
            f"'{name}' is cut as {cut.kind!r} from {cut.width_in} inputs and {cut.width_out} outputs to "
            f"{cut.groups} groups, which does not fit its dense shapes {own or '(none: no such module)'}"
        )


def _weight_fits(cut: ModuleCut, shape: tuple[int, ...]) -> bool:
    if cut.kind == "linear":
        return shape == (cut.width_out, cut.width_in) and cut.groups == 1
    rows, columns = cut.width_out, cut.width_in
    if cut.kind == "conv_transpose":
        rows, columns = columns, rows
    if len(shape) < 3 or shape[0] != rows or shape[1] < 1 or columns % shape[1]:
        return False
    groups = columns // shape[1]
    if groups < 1 or rows % groups:
        return False
    if cut.void:
        return True
    # Groups go as a whole, and those that stay keep equally many inputs and outputs each.
    inputs = Counter(index * groups // cut.width_in for index in cut.inputs)
    outputs = Counter(index * groups // cut.width_out for index in cut.outputs)
    return (
        len(outputs) == cut.groups
        and inputs.keys() == outputs.keys()
        and len(set(inputs.values())) == len(set(outputs.values())) == 1
    )


def is_of_kind(module: nn.Module, cut: ModuleCut) -> bool:
    """Return whether `module` is of the kind that `cut` was made for."""
    if isinstance(module, _ConvTransposeNd):
        return cut.kind == "conv_transpose"
    if isinstance(module, Select):
        return cut.kind == "select" and module.source_width == cut.width_in
    return isinstance(module, KINDS[cut.kind])
