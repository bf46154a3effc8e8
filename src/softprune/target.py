"""Targets: the metric of the compact network to limit, and its limit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from softprune.errors import ConfigError, is_number, nearest

Amount = float | str
"""A share to keep (0.5 or "50%"), or an absolute value (a number above 1, or with its unit: "0.8 ms")."""
TargetLike = Mapping[str, Amount]
FINAL_AT = 0.6
"""Share of the training after which the cut is final at the latest, by default."""


@dataclass(frozen=True)
class Quantity:
    """A metric that a target can limit. `softprune.budget.limit` computes it."""

    unit: str
    smallest: float
    """Smallest plausible absolute value; a smaller one is probably meant as a share or a percentage."""
    is_whole: bool = True
    """Whether values are integers."""


QUANTITIES: dict[str, Quantity] = {
    "macs": Quantity("MACs", 100),
    "flops": Quantity("FLOPs", 200),
    "params": Quantity("parameters", 100),
    "activations": Quantity("activations", 100),
    "channels": Quantity("channels", 2),
    "latency": Quantity("ms", 0, is_whole=False),
}


@dataclass(frozen=True)
class Target:
    """A validated target: an absolute limit, or a share of the dense network's value."""

    key: str
    amount: float
    is_share: bool

    def __str__(self) -> str:
        return f"{self.key} = {self.amount:.12g}{'' if self.is_share else f' {self.quantity.unit}'}"

    @property
    def quantity(self) -> Quantity:
        return QUANTITIES[self.key]

    def limit(self, dense: float) -> float:
        """Return the maximum value of the metric, given the value `dense` of the dense network."""
        limit = self.amount * dense if self.is_share else self.amount
        return float(math.floor(limit)) if self.quantity.is_whole else limit

    def figure(self, value: float) -> str:
        return f"{value:,.0f} {self.quantity.unit}" if self.quantity.is_whole else f"{value:.4g} {self.quantity.unit}"


def read_target(target: TargetLike) -> Target:
    """Validate a target such as ``{"macs": 0.5}``."""
    keys = ", ".join(QUANTITIES)
    if not isinstance(target, Mapping) or len(target) != 1:
        raise ConfigError(
            f"`target` must be one key with its amount, such as {{'macs': 0.5}}. Got {target!r}; choose one of {keys}."
        )
    key, amount = next(iter(target.items()))
    if key not in QUANTITIES:
        raise ConfigError(f"`target` must name one of {keys}. Got {key!r}.{nearest(str(key), QUANTITIES)}")
    return Target(key, *_amount(key, amount))


def _amount(key: str, amount: Amount) -> tuple[float, bool]:
    quantity = QUANTITIES[key]
    text = amount.strip().lower() if isinstance(amount, str) else repr(float(amount)) if is_number(amount) else ""
    unit = next((end for end in ("%", quantity.unit.lower()) if text.endswith(end)), "")
    try:
        value = float(text.removesuffix(unit).replace("_", "").replace(",", "")) / (100 if unit == "%" else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            "The amount of a target is a share to keep, between 0 and 1 or as a percentage, or an absolute value: "
            f"0.5, '50%' or {'60000000' if quantity.is_whole else f'3.5 (or 0.8 {quantity.unit} in quotes)'}. "
            f"Got {key} = {amount!r}."
        )
    is_share = unit == "%" or (unit == "" and value <= 1)
    if is_share and value >= 1:
        raise ConfigError(f"A target must keep less than the whole network. Got {key} = {amount!r}.")
    if not is_share and value < quantity.smallest:
        raise ConfigError(
            f"A share to keep is below 1; a larger amount is an absolute value. Got {key} = {amount!r}, which means "
            f"{value:g} {quantity.unit}; write 0.5 or '50%' for half of the network."
        )
    return value, is_share
