"""The options that every pruning method takes, declared once, and the checks of what a pruner is given."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args, get_type_hints, is_typeddict

from torch import Tensor, nn

from softprune.budget import TableLike
from softprune.cut.selection import Globs
from softprune.errors import CheckpointError, ConfigError, ModelError, is_integer, is_number, nearest
from softprune.graph import ChannelGraph, check_is_module
from softprune.module_state import first_uninitialised, non_finite
from softprune.target import TargetLike

RoundTo = int | Literal["auto"]
"""A multiple of channels, or "auto" for the one in which the device of the model is fast."""


class SiteOptions(TypedDict, total=False):
    """Which BatchNorms a method prunes, and its seed."""

    include: Globs
    """Prune only these BatchNorms: names, with wildcards. Default: all that can be masked."""
    exclude: Globs
    """Do not prune these BatchNorms."""
    seed: int
    """Seed of the method's random numbers, for methods that draw any. Default: 0."""


class PrunerOptions(SiteOptions, total=False):
    """The options of every pruning method, beside the model, the example and the method's own options."""

    round_to: RoundTo
    """Keep a multiple of this many channels at every site. "auto" takes 32 on a GPU and 16 on a CPU, halved until
    most sites hold it twice; ``pruner.round_to`` is the number. Default: 1."""
    min_channels: int
    """Keep at least this many channels at every site. Where emptying a site would cut every path to an output, one
    channel stays in any case. Sites with a depthwise convolution between them keep this many in common. Default: 0."""


class TargetOptions(PrunerOptions, total=False):
    """The options of methods that rank channels: a target in place of their ratio."""

    target: TargetLike | None
    """Instead of a ratio, a budget that the cut meets: ``{"macs": 0.5}`` keeps at most half of the MACs. See
    :class:`softprune.SoftPruner`."""
    latency_batch: int | None
    """Samples per call at which a latency target is measured; the example's by default."""
    latency_table: TableLike | None
    """For a latency target of another machine: a table of :func:`softprune.budget.latency_table`, or its file."""


def keywords_of(pruner: type) -> tuple[str, ...]:
    """Return the keyword arguments of a pruner class, those of its options TypedDict or of its base class included."""
    names: list[str] = []
    for init in (vars(cls)["__init__"] for cls in pruner.__mro__ if "__init__" in vars(cls)):
        parameters = list(inspect.signature(init).parameters.values())[3:]  # after self, model, example
        names += [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
        declared = [each for each in get_args(get_type_hints(init).get("".join(rest))) if is_typeddict(each)]
        names += [name for each in declared for name in get_type_hints(each)]
        if declared or not rest:
            break
    return tuple(dict.fromkeys(names))


def check_keywords(pruner: type, given: Mapping[str, Any]) -> None:
    """Raise a TypeError for a keyword that no method has, with the one that may be meant."""
    unknown = min(given.keys() - PrunerOptions.__annotations__.keys(), default=None)
    if unknown is not None:
        hint = nearest(unknown, keywords_of(pruner))
        raise TypeError(f"{pruner.__name__} got an unexpected keyword argument {unknown!r}.{hint}")


def check_strength(strength: float | Tensor) -> None:
    """Raise unless it is a number that a loss can be weighted with."""
    if isinstance(strength, Tensor) and strength.numel() == 1:
        if strength.device.type != "cpu":
            return  # reading it would wait for the device
        strength = strength.item()
    if not is_number(strength) or not 0 <= strength < math.inf:
        raise ConfigError(f"`strength` must be a finite number of at least 0. Got {strength!r}; try 1e-4.")


def check_has_target(target: TargetLike | None, **options: object) -> None:
    """Raise if one of `options`, which act on a target alone, is given without one."""
    for name, value in options.items():
        if target is None and value is not None:
            raise ConfigError(f"`{name}` needs a `target`. Got {value!r} without one; set `target`, or leave it out.")


def is_positive(value: object) -> bool:
    """Whether it is a finite number above 0."""
    return is_number(value) and 0 < value < math.inf


def check_state(state: object, keys: set[str]) -> None:
    """Raise unless it is a pruner's state, whole."""
    if not isinstance(state, dict) or not keys <= state.keys():
        got = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"a pruner's state must be what state_dict() returned. Got {got}; pass that part of the checkpoint."
        )


def check_made_alike(made: dict[str, Any], state: dict[str, Any]) -> None:
    """Raise a CheckpointError unless a state is of a pruner that was `made` alike."""
    ours, theirs = ({**each, **each.get("settings", {})} for each in (made, state))
    for name, here in ours.items():
        if name != "settings" and theirs.get(name) != here:
            later = ", or set pruner.strength after loading" if name == "strength" else ""
            raise CheckpointError(
                f"a pruner's state must be of the same method, sites, floors and settings. In this pruner {name!r} is "
                f"{here!r}; got {theirs.get(name)!r}. Make the pruner as that of the checkpoint was made{later}."
            )


def check_rounding(round_to: int, min_channels: int) -> None:
    """Raise unless both are numbers of channels."""
    if not is_integer(round_to) or round_to < 1:
        raise ConfigError(f"round_to must be an integer of at least 1. Got {round_to!r}.")
    if not is_integer(min_channels) or min_channels < 0:
        raise ConfigError(f"min_channels must be an integer of at least 0. Got {min_channels!r}.")


def check_values(model: nn.Module) -> None:
    """Raise unless it is a network whose every parameter has finite values."""
    check_is_module(model)
    missing = first_uninitialised(model)
    if missing is not None:
        name, kind = missing
        raise ModelError(
            f"parameters must have values. Got '{name}', a {kind} one; run the model once, or load its weights, "
            "before the pruner is made."
        )
    bad = non_finite(model)
    if bad:
        raise ModelError(
            f"parameters and statistics must be finite. Got NaN or infinity in '{bad[0]}'; go back to a checkpoint "
            "from before training diverged."
        )


def nothing_to_prune(model: nn.Module, graph: ChannelGraph, chosen: bool) -> ModelError:
    """The error for a network without a site, with the reasons, and the option that would help.

    ``chosen``: the user includes or excludes BatchNorms, which may be the reason.
    """
    names: dict[str, list[str]] = {}
    for item in graph.frozen:
        names.setdefault(item.reason, []).append(f"'{item.name}'")
    if not names:
        return ModelError(
            "softprune masks BatchNorms that an activation follows. "
            f"Got a {type(model).__name__} without any BatchNorm: there is nothing to prune here. Use a variant of the "
            "network that has them."
        )
    reasons = [
        f"{', '.join(who[:2])}{f' and {len(who) - 2} more' if len(who) > 2 else ''}: {why}"
        for why, who in names.items()
    ]
    shown = "; ".join(reasons[:5]) + (f"; and {len(reasons) - 5} more reasons" if len(reasons) > 5 else "")
    further = {} if chosen else graph.further_kinds()
    counts = ", ".join(f'"{kind}" {count}' for kind, count in further.items())
    remedy = "Change `include` and `exclude`" if chosen else "docs/sites.md says which BatchNorms can be masked"
    if further:
        remedy = f"Use SoftPruner with site_kinds={tuple(further)!r}, which may mask some of them: {counts}"
    return ModelError(f"no BatchNorm of this {type(model).__name__} can be masked. {shown}. {remedy}.")
