"""The options that every pruning method takes, declared once."""

from typing import Literal, TypedDict, get_args, get_type_hints

from softprune.config.target import TargetLike
from softprune.selection import Globs

RoundTo = int | Literal["auto"]
"""A multiple of channels, or "auto" for the multiple that is fastest on this machine."""


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
    """Keep a multiple of this many channels at every site. "auto" measures which multiple is fastest on this machine;
    ``pruner.round_to`` is the number it chose. Default: 1."""
    min_channels: int
    """Keep at least this many channels at every site. Where emptying a site would cut every path to an output, one
    channel stays in any case. Sites with a depthwise convolution between them keep this many in common. Default: 0."""


class RankingOptions(PrunerOptions, total=False):
    """The options of methods that rank channels: a target in place of their ratio."""

    target: TargetLike | None
    """Instead of a ratio, a budget that the cut meets: ``{"macs": 0.5}`` keeps at most half of the MACs. See
    :class:`softprune.SoftPruner`."""
    latency_batch: int | None
    """Samples per call at which a latency target is measured; the example's by default."""


def keywords_of(build: type) -> tuple[str, ...]:
    """Return the keyword arguments of a pruner class, those of its options TypedDict included."""
    hints = get_type_hints(build.__init__)  # type: ignore[misc]
    names: list[str] = []
    for name, hint in hints.items():
        unpacked = [part for part in get_args(hint) if hasattr(part, "__required_keys__")]
        names += get_type_hints(unpacked[0]) if unpacked else [name]
    return tuple(name for name in names if name not in ("model", "example", "return"))
