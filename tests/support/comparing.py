"""What every exactness test does: random masks, both networks, the largest difference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from softprune.cut import PrunePlan, apply_plan, make_plan, required_sites
from softprune.cut.verify import compare, mask_sites_, outputs_of
from softprune.graph import ChannelGraph, Example


def random_masks(graph: ChannelGraph, seed: int, *, deaths: float = 0.0) -> dict[str, Tensor]:
    """Random masks; each site that may die does so with probability `deaths`."""
    generator = torch.Generator().manual_seed(seed)
    required = required_sites(graph)
    masks = {}
    for site in graph.sites:
        share = float(torch.rand((), generator=generator))
        mask = torch.rand(site.width, generator=generator) < share
        if site.name in required and not mask.any():
            mask[int(torch.randint(site.width, (), generator=generator))] = True
        if site.name not in required and float(torch.rand((), generator=generator)) < deaths:
            mask[:] = False
        masks[site.name] = mask
    return masks


def masked(model: nn.Module, masks: dict[str, Tensor]) -> nn.Module:
    """A copy of `model` that evaluates with `masks`."""
    reference = copy.deepcopy(model)
    mask_sites_(reference, masks)
    return reference


def relative_difference(expected: nn.Module, got: nn.Module, example: Any, *, sizes: int = 2) -> float:
    """Largest difference of the outputs over the largest output, on the example and on a larger random input.

    With one of the two `sizes`, on the example alone.
    """
    call = Example.of(example).to_model(expected)
    worst = 0.0
    for attempt in (call, call.map(_larger))[:sizes]:
        try:
            wanted = outputs_of(expected, attempt)
        except (RuntimeError, ValueError):  # the network takes no other size
            assert attempt is not call
            continue
        difference, scale = compare(wanted, outputs_of(got, attempt))
        worst = max(worst, difference / max(scale, 1e-30))
    return worst


def _larger(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    space = [size + 5 for size in tensor.shape[2:]]
    return torch.randn(3, tensor.shape[1], *space, generator=generator).to(tensor.dtype)


def assert_exact(graph: ChannelGraph, model: nn.Module, masks: dict[str, Tensor], **options: Any) -> PrunePlan:
    """masked == compact in float64 and float32, and the compact network is what the plan predicts."""
    plan = make_plan(graph, model, masks, **options)
    compact = apply_plan(plan, model)
    members = graph.member_masks(masks)
    # Precision and image size are independent: one other size, in float64, is enough.
    assert relative_difference(masked(model, members), compact, graph.example, sizes=1) <= 1e-5
    wide = copy.deepcopy(model).double()
    wide_compact = apply_plan(plan, wide)
    mask_sites_(wide, members)
    assert relative_difference(wide, wide_compact, graph.example) <= 1e-10
    assert sum(parameter.numel() for parameter in compact.parameters()) == plan.params
    assert PrunePlan.from_json(plan.to_json()) == plan
    return plan
