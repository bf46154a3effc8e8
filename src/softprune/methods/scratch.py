"""Training from scratch: train the architecture of a pruned network from random weights.

This control shows whether the remaining weights matter or only the widths.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from softprune.cut import PrunePlan, plans_of, read_plans, saved_path
from softprune.cut.selection import Globs
from softprune.errors import ConfigError, PlanError
from softprune.graph import ChannelGraph, ExampleLike
from softprune.masks import Masks
from softprune.methods.pruner import Pruner

PlanLike = PrunePlan | str | os.PathLike[str]
"""A plan, the file of a compact network, or the folder of a run."""


class ScratchPruner(Pruner):
    """Trains a network from random weights with the fixed masks of a plan.

    The dropped channels are off in training and evaluation from the first step. This is equivalent to training the
    compact network from scratch, but recipes, records and the verified cut work as for other methods. The weights are
    initialised at the dense width; before a BatchNorm, their scale has no effect.

    Args:
        model: A newly built network with the architecture that was pruned, masked in place.
        example: An input of the model.
        plan: A plan, the file of a compact network, or the folder of a finished run.
    """

    name = "scratch"
    description = "architecture of a finished run, trained from random weights: the control for a method's weights"
    continues = True
    every_norm = True
    settings = ("kept",)

    def __init__(self, model: nn.Module, example: ExampleLike, *, plan: PlanLike | None = None) -> None:
        if plan is None:
            raise ConfigError(
                "`scratch` needs a `plan`, the architecture to train. Got none; pass the folder of a finished run "
                "(method.options.plan in a recipe)."
            )
        self._plans = _plans(plan)
        super().__init__(model, example)

    def _read(self, example: ExampleLike, **globs: Globs) -> ChannelGraph:
        cuts = plans_of(self.model)
        if not cuts:
            self._plans[0].check_fits(self.model)
        elif cuts[0].dense != self._plans[0].dense:
            raise PlanError("`plan` must belong to the network that `model` was cut from. Got that of another one.")
        self.kept, _ = _dense_channels(self._plans)
        # If training continues after a cut (train.compact_at), some channels are already removed.
        _, present = _dense_channels(cuts)
        graph = super()._read(example, **globs)
        self._initial: dict[str, Tensor] = {}
        for site in graph.sites:
            if site.name in self.kept:
                here = torch.tensor(present.get(site.name, range(site.width)))
                self._initial[site.name] = torch.isin(here, torch.tensor(self.kept[site.name], dtype=torch.long))
        return graph.only({s.name: "the plan does not mask it" for s in graph.sites if s.name not in self._initial})

    def _make_masks(self) -> Masks:
        masks = super()._make_masks()
        masks.load_state_dict({"keep": masks.row(self._initial)})
        return masks


def _plans(plan: PlanLike) -> tuple[PrunePlan, ...]:
    if isinstance(plan, PrunePlan):
        return (plan,)
    path = Path(plan)
    file = saved_path(path / "compact" if path.is_dir() else path)
    if not file.exists():
        raise ConfigError(
            "`plan` must be a plan, the file of a compact network, or the folder of a finished run. Got "
            f"{path}: {file} does not exist; if it was moved, change method.options.plan in config.toml."
        )
    return tuple(read_plans(file))


def _dense_channels(plans: Sequence[PrunePlan]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the dense indices of the channels kept by the masks of `plans`, and of those that are still present."""
    present: dict[str, list[int]] = {}
    kept: dict[str, list[int]] = {}
    for plan in plans:
        for name, module in plan.modules.items():
            here = present.get(name, [*range(module.width_out)])
            if name in plan.sites:
                kept[name] = [here[index] for index in plan.sites[name]]
            if module.kind == "norm":
                present[name] = [here[index] for index in module.outputs]
    return kept, present
