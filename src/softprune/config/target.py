"""What a user asks for: one figure of the network, and how much of it may stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from softprune.errors import ConfigError, nearest

Key = Literal["macs", "params", "channels", "latency"]
Amount = float | str
"""A share to keep (0.5 or "50%"), or the figure itself (any number above 1; "0.8 ms" for a latency)."""
TargetLike = Mapping[str, Amount]

UNITS: dict[str, str] = {"macs": "MACs", "params": "parameters", "channels": "channels", "latency": "ms"}
_FEWEST = {"macs": 100, "params": 100, "channels": 2, "latency": 0}
"""Figures below are no network's: who wrote one meant a share or a percentage."""


@dataclass(frozen=True)
class Target:
    """A target as it was asked for; the dense network turns a share into a limit."""

    key: Key
    amount: float
    is_share: bool

    def limit(self, dense: float) -> float:
        """The figure that must not be exceeded, for a network whose dense figure is `dense`."""
        limit = self.amount * dense if self.is_share else self.amount
        return limit if self.key == "latency" else float(math.floor(limit))

    def figure(self, value: float) -> str:
        """A figure of this kind in words."""
        return f"{value:.4g} ms" if self.key == "latency" else f"{value:,.0f} {UNITS[self.key]}"


def read_target(target: TargetLike) -> Target:
    """Check what the user wrote, such as ``{"macs": 0.5}``."""
    if not isinstance(target, Mapping) or len(target) != 1:
        raise ConfigError(
            f"`target` must be one key with its amount, such as {{'macs': 0.5}}. Got {target!r}; "
            f"choose one of {', '.join(get_args(Key))}."
        )
    key, amount = next(iter(target.items()))
    if key not in get_args(Key):
        raise ConfigError(
            f"`target` must name one of {', '.join(get_args(Key))}. Got {key!r}.{nearest(str(key), get_args(Key))}"
        )
    value, is_share = _amount(key, amount)
    return Target(key, value, is_share)  # type: ignore[arg-type]


def _amount(key: str, amount: Amount) -> tuple[float, bool]:
    wrong = ConfigError(
        f"The amount of a target is a share to keep, between 0 and 1 or as a percentage, or the figure itself: "
        f"0.5, '50%' or {'3.5 (or 0.8 ms in quotes)' if key == 'latency' else '60000000'}. "
        f"Got {key} = {amount!r}."
    )
    unit = ""
    value: float
    if isinstance(amount, str):
        text = amount.strip().lower()
        unit = next((end for end in ("%", "ms") if text.endswith(end)), "")
        try:
            value = float(text.removesuffix(unit).replace("_", "").replace(",", ""))
        except ValueError:
            raise wrong from None
    elif isinstance(amount, bool) or not isinstance(amount, Real):
        raise wrong
    else:
        value = float(amount)
    if unit == "%":
        value /= 100
    if not math.isfinite(value) or value <= 0 or (unit == "ms" and key != "latency"):
        raise wrong
    is_share = unit == "%" or (unit == "" and value <= 1)
    if is_share and value >= 1:
        raise ConfigError(f"A target must keep less than the whole network. Got {key} = {amount!r}.")
    if not is_share and value < _FEWEST[key]:
        raise ConfigError(
            f"A share to keep is below 1; anything above is the figure itself. Got {key} = {amount!r}, which is read "
            f"as {value:g} {UNITS[key]}; write 0.5 or '50%' for half of the network."
        )
    return value, is_share
