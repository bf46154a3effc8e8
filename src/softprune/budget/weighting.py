"""Cost in the sparsity loss: channels whose removal frees more are pushed harder."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from softprune.budget.measures import Measure
from softprune.errors import ConfigError, is_number

_CAP = 4.0
"""The largest factor: a few costly layers would lose nearly all of their channels otherwise."""
_REFRESH = 0.1
"""The share of the kept channels that must have changed before the factors are computed again."""


class CostWeights:
    """One factor per site: (what removing one of its channels frees) ** exponent, with mean 1 over the channels."""

    def __init__(self, exponent: float, measure: Measure, widths: Mapping[str, int]) -> None:
        if not is_number(exponent) or not 0 <= exponent <= 1:
            raise ConfigError(
                "`cost_weighting` must be from 0 (every channel alike) to 1 (proportional to the cost). "
                f"Got {exponent!r}; try 0.5."
            )
        self.exponent, self.measure, self.widths = float(exponent), measure, dict(widths)
        self.factors = dict.fromkeys(self.widths, 1.0)
        self._kept: dict[str, int] | None = None

    def refresh(self, network: nn.Module, keep: Mapping[str, Tensor]) -> None:
        """Compute the factors for the widths of `keep`, unless they have changed little since the last time."""
        kept = {name: int(mask.sum()) for name, mask in keep.items()}
        moved = math.inf if self._kept is None else sum(abs(kept[name] - n) for name, n in self._kept.items())
        if self.exponent == 0 or moved <= _REFRESH * sum(self.widths.values()):
            return
        whole = self.measure(network, keep)
        freed = {}
        for name, mask in keep.items():
            removes = kept[name] > 1
            # With nothing to remove: as if one channel came back.
            chosen = torch.nonzero(mask)[-1:] if removes else torch.nonzero(~mask)[:1]
            changed = mask.index_fill(0, chosen.flatten(), not removes)
            freed[name] = abs(whole - self.measure(network, {**keep, name: changed}))
        raised = {name: value**self.exponent for name, value in freed.items()}
        self.factors = self._normalised(raised)
        self._kept = kept

    def _normalised(self, raised: Mapping[str, float]) -> dict[str, float]:
        capped: dict[str, float] = {}
        while True:  # capping leaves more to the others, which raises them
            left = {name: value for name, value in raised.items() if name not in capped}
            room = sum(self.widths.values()) - sum(value * self.widths[name] for name, value in capped.items())
            mean = sum(value * self.widths[name] for name, value in left.items()) / room
            if mean == 0:
                return {**dict.fromkeys(self.widths, 0.0 if capped else 1.0), **capped}
            factors = {name: value / mean for name, value in left.items()}
            over = [name for name, value in factors.items() if value > _CAP]
            if not over:
                return {**factors, **capped}
            capped |= dict.fromkeys(over, _CAP)

    def apply(self, factors: Mapping[str, Tensor], network: nn.Module, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `factors` times the cost factor of each site, refreshed for the channels of `keep`."""
        self.refresh(network, keep)
        return {name: factor * self.factors[name] for name, factor in factors.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"factors": dict(self.factors), "kept": None if self._kept is None else dict(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factors, self._kept = dict(state["factors"]), state["kept"]
