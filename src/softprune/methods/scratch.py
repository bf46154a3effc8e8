"""Same shape from scratch: what a pruned network's architecture reaches from new weights with the same training.

A control: do the remaining weights matter, or only the widths?
"""

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.cut import PrunePlan, apply_plan, plans_of, read_plans, saved_path
from softprune.errors import CheckpointError, ConfigError, PlanError
from softprune.graph import ChannelGraph, ExampleLike
from softprune.masks import StoredMasks
from softprune.methods.options import SiteOptions
from softprune.methods.pruner import GraphReader, Pruner

PlanLike = PrunePlan | Sequence[PrunePlan] | str | os.PathLike[str]
"""A plan, the plans of a network that was cut several times, a compact network's folder, or the folder of a run."""


def from_scratch(plan: PlanLike | nn.Module, fresh: nn.Module) -> nn.Module:
    """Return a compact network of the shape that `plan` (or a compact network) has, with the new weights of `fresh`.

    `fresh` is a newly built dense network of the same definition; it stays as it is. The kept rows and columns of
    its weights are scaled to the smaller fan-in, so that they are spread as if drawn at that size. Everything then
    trains: also what the plan had zeroed or folded.
    """
    plans = plans_of(plan) if isinstance(plan, nn.Module) else _plans(plan)
    if not plans:
        raise PlanError("`plan` must come from a network that softprune cut. Got a dense network.")
    compact = copy.deepcopy(fresh)
    for step in plans:
        # Without its constants: folded biases are learned again.
        compact = apply_plan(replace(step, constants={}), compact)
    dense_modules = dict(fresh.named_modules())
    with torch.no_grad():
        for name, module in compact.named_modules():
            dense = dense_modules.get(name)
            if isinstance(module, _BatchNorm) and isinstance(dense, _BatchNorm) and module.affine:
                # All scales and shifts of a new BatchNorm are alike; the plan may have zeroed some.
                module.weight.fill_(dense.weight[0])
                module.bias.fill_(dense.bias[0])
            weight, old = getattr(module, "weight", None), getattr(dense, "weight", None)
            if isinstance(weight, Tensor) and isinstance(old, Tensor) and weight.dim() > 1:
                weight.mul_(math.sqrt(old[0].numel() / weight[0].numel()))
    return compact


class ScratchPruner(Pruner):
    """Trains a network under the masks of a finished plan, from its own new weights.

    The dropped channels are off in training and evaluation from the first step, so that this is the compact
    network's training from scratch, and everything else (recipes, records, the verified cut) works as for a method.
    The weights start as the dense definition draws them; before a BatchNorm their scale has no effect.

    Args:
        model: A newly built network of the definition that was pruned; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        plan: The shape: a plan, the file of a compact network, or the folder of a finished run.
        options: See :class:`softprune.methods.options.SiteOptions`; they choose among the plan's sites.
    """

    name = "scratch"
    description = "a finished run's shape trained from new weights: the control for a method's weights"
    continues = True

    def __init__(
        self, model: nn.Module, example: ExampleLike, *, plan: PlanLike | None = None, **options: Unpack[SiteOptions]
    ) -> None:
        if plan is None:
            raise ConfigError(
                "`scratch` needs a `plan`, the shape to train. Got none; pass the folder of a finished run "
                "(method.options.plan in a recipe)."
            )
        self._plans = _plans(plan)
        super().__init__(model, example, **options)

    def _read(self, read: GraphReader) -> ChannelGraph:
        cuts = plans_of(self.model)
        if not cuts:
            self._plans[0].check_fits(self.model)
        elif cuts[0].dense != self._plans[0].dense:
            raise PlanError("`plan` must be of the network that `model` was cut from. Got another one's.")
        kept, _ = _dense_channels(self._plans)
        # In training that continues after a cut (train.compact_at), some are gone already.
        _, present = _dense_channels(cuts)
        graph = read(every_norm=True)
        self._initial: dict[str, Tensor] = {}
        for site in graph.sites:
            if site.name in kept:
                here = torch.tensor(present.get(site.name, tuple(range(site.width))))
                self._initial[site.name] = torch.isin(here, torch.tensor(kept[site.name], dtype=torch.long))
        return graph.only({s.name: "the plan does not mask it" for s in graph.sites if s.name not in self._initial})

    def _make_masks(self) -> StoredMasks:
        masks = StoredMasks(self.model, self.sites, self.clock, masked_training=True)
        masks.keep.copy_(masks.row(self._initial))
        return masks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = self.masks()
        super().load_state_dict(state)
        if not all(mask.equal(before[name]) for name, mask in self.masks().items()):
            raise CheckpointError(
                "A run must be resumed with the plan that it began with. Got a plan that keeps other channels; restore "
                "its file, or change method.options.plan in config.toml if it is elsewhere now."
            )


def _plans(plan: PlanLike) -> tuple[PrunePlan, ...]:
    if isinstance(plan, PrunePlan):
        return (plan,)
    if isinstance(plan, Sequence) and not isinstance(plan, str) and all(isinstance(p, PrunePlan) for p in plan):
        return tuple(plan)
    if not isinstance(plan, str | os.PathLike):
        raise PlanError(
            "`plan` must be a PrunePlan, several of them, the file of a compact network, or the folder of a run. "
            f"Got {plan!r}."
        )
    path = Path(plan)
    file = saved_path(path / "compact" if path.is_dir() else path)
    if not file.exists():
        raise ConfigError(
            f"`plan` must be the file of a compact network or the folder of a finished run. Got {path}: {file} does "
            "not exist. If the plan of a run that was started is elsewhere now, change method.options.plan in its "
            "config.toml."
        )
    return tuple(read_plans(file))


def _dense_channels(plans: Sequence[PrunePlan]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the channels of the dense BatchNorms that the masks of `plans` keep, and those that are still there."""
    present: dict[str, tuple[int, ...]] = {}
    kept: dict[str, tuple[int, ...]] = {}
    for plan in plans:
        for name, indices in plan.sites.items():
            here = present.get(name, tuple(range(plan.modules[name].width_out)))
            kept[name] = tuple(here[index] for index in indices)
        for name, module in plan.modules.items():
            if module.kind == "norm":
                here = present.get(name, tuple(range(module.width_out)))
                present[name] = tuple(here[index] for index in module.outputs)
    return kept, present
