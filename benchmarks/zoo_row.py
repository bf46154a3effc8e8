"""What the zoo does with one network: inspect, a few training steps, a random cut, and the proof that it is exact."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from zoo_networks import Entry

import softprune
from softprune.cut import floor_masks, make_plan, plain_copy, required_sites
from softprune.errors import ModelError, SoftpruneError
from softprune.graph import ChannelGraph
from softprune.graph.channels import DEFAULT_KINDS, KINDS
from softprune.masks import mask_sites_

KEEP = 0.5
"""Chance of a channel to be kept."""
EMPTY = 0.1
"""Chance of a site to lose all its channels, where that is allowed."""
OF_THE_NETWORK = ("name", "source", "input", "batch_norms", "macs", "params")
"""What does not depend on the kinds of sites."""


def examine_both(entry: Entry, *, steps: int = 2) -> dict[str, Any]:
    """One row of the zoo's table: the default kinds of sites, and all kinds under "all_kinds"."""
    row, every = examine(entry, steps=steps), examine(entry, kinds=KINDS, steps=steps)
    return row | {"all_kinds": {key: value for key, value in every.items() if key not in OF_THE_NETWORK}}


def examine(entry: Entry, *, kinds: Sequence[str] = DEFAULT_KINDS, steps: int = 2, seed: int = 0) -> dict[str, Any]:
    """What becomes of a network with these kinds of sites. A refusal has its reason; other exceptions are passed on."""
    torch.manual_seed(seed)
    model = entry.build()
    example = entry.example()
    row: dict[str, Any] = {
        "name": entry.name,
        "source": entry.source,
        "input": "x".join(map(str, example.shape[1:])),
        "batch_norms": sum(isinstance(module, _BatchNorm) for module in model.modules()),
    }
    clock = _Clock()
    began = time.perf_counter()
    try:
        pruner = softprune.SoftPruner(model, example, strength=1e-4, site_kinds=kinds)
        clock.lap("analyse")
        row["loss_is_finite"] = train(model, pruner, example, steps)
        clock.lap("train")
        pruner.detach()
        row |= _cut(model.double(), example.double(), pruner.graph, seed, clock)
    except ModelError as error:
        row |= {"status": "refused", "reason": str(error)}
    except SoftpruneError as error:
        row |= {"status": "failed", "reason": str(error)}
    row["seconds"] = {**clock.laps, "all": time.perf_counter() - began}
    return row


def train(model: nn.Module, pruner: softprune.Pruner, example: Tensor, steps: int) -> bool:
    """A few steps of joint training, as in any user's loop, on whatever the network gives out; is the loss finite?"""
    optimizer = torch.optim.SGD(pruner.parameter_groups(weight_decay=1e-4), lr=1e-3)
    pruner.attach(optimizer)
    model.train()
    loss = torch.zeros(())
    for _ in range(steps):
        outputs = [leaf for leaf in pytree.tree_leaves(_plain(model(example))) if isinstance(leaf, Tensor)]
        loss = pruner.loss(sum((output.square().mean() for output in outputs), torch.zeros(())))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return bool(torch.isfinite(loss))


def _plain(output: Any) -> Any:
    return dict(output) if hasattr(output, "keys") else output


def _cut(model: nn.Module, example: Tensor, graph: ChannelGraph, seed: int, clock: "_Clock") -> dict[str, Any]:
    """Cut by a random mask and prove the result exact."""
    randomise_(model, seed)
    required = required_sites(graph)
    masks = random_masks({site.name: site.width for site in graph.sites}, required, seed)
    plan = make_plan(graph, model, masks)
    compact = softprune.apply_plan(plan, model)
    clock.lap("cut")
    masked = plain_copy(model)
    mask_sites_(masked, {member: masks[site.name] for site in graph.sites for member in site.members})
    certificate = softprune.verify(masked, compact, example)
    clock.lap("verify")
    floor = make_plan(graph, model, floor_masks(graph))
    before, after = softprune.cost(model, example[:1]), softprune.cost(compact, example[:1])
    cuts = plan.modules.values()
    return {
        "status": "exact" if after.macs < before.macs else "not smaller",
        "sites": len(graph.sites),
        "masked": sum(len(site.members) for site in graph.sites),
        "channels": sum(site.width for site in graph.sites),
        "activations": dict(Counter(site.activation for site in graph.sites)),
        "frozen": dict(Counter(short_reason(frozen.reason) for frozen in graph.frozen).most_common()),
        "operators_without_rule": dict(graph.unknown),
        "macs": before.macs,
        "params": before.params,
        "macs_reachable": 1 - floor.macs / floor.dense_macs,
        "macs_kept": after.macs / before.macs,
        "params_kept": after.params / before.params,
        # Convolutions with fixed filters (BlurPool) cost MACs, too, but are no layer that a plan knows.
        "predicted": after.macs - plan.macs == before.macs - plan.dense_macs and plan.params == after.params,
        "selects": sum(cut.select is not None for cut in cuts),
        "voids": sum(cut.constant for cut in cuts),
        "folded": sum(cut.folded for cut in cuts),
        "difference": certificate.max_difference,
        "scale": certificate.scale,
    }


def randomise_(model: nn.Module, seed: int) -> None:
    """BatchNorms as after a training: without this, shifts are zero and hide what a wrong cut would change."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            with torch.no_grad():
                for tensor in (module.weight, module.bias, module.running_mean):
                    if tensor is not None:
                        tensor.normal_(0, 0.5, generator=generator)
                if module.weight is not None:
                    module.weight += 1
                if module.running_var is not None:
                    module.running_var.uniform_(0.5, 2, generator=generator)


def random_masks(widths: Mapping[str, int], required: frozenset[str], seed: int) -> dict[str, Tensor]:
    """Half of all channels at random, and some sites empty."""
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for name, width in widths.items():
        mask = torch.rand(width, generator=generator) < KEEP
        if name in required and not mask.any():
            mask[0] = True
        if name not in required and torch.rand((), generator=generator) < EMPTY:
            mask[:] = False
        masks[name] = mask
    return masks


def short_reason(reason: str) -> str:
    """A reason without the names of modules, so that equal ones can be counted."""
    return re.sub(r" in (the model's forward|'[^']*')|'[^']*' ?", "", reason).strip()


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now
