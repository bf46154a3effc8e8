"""Which dimensions of an export are free: the first one of every input, the batch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from softprune.errors import ModelError
from softprune.graph import Example

TRACED_BATCH = 2
"""Batch size of the export: torch.export takes a size of one for a constant."""


def exportable(example: Example, *, dynamic_batch: bool) -> Example:
    """The example at a batch size that an export with a free batch can start from."""
    if not dynamic_batch:
        return example
    batch = example.batch_size()
    if batch is None:
        raise ModelError(
            "a free batch size needs inputs that all have the batch as their first dimension. Got first dimensions "
            f"{[tuple(tensor.shape)[:1] for tensor in example.tensors()]}; pass dynamic_batch=False."
        )
    return example if batch > 1 else example.with_batch(TRACED_BATCH)


def dynamic_shapes(model: nn.Module, example: Example, *, dynamic_batch: bool) -> dict[str, Any] | None:
    """torch.export's description of the free dimensions, by the names of the forward's parameters."""
    if not dynamic_batch:
        return None
    batch = torch.export.Dim("batch", min=1)

    def free(leaf: Any) -> Any:
        return {0: batch} if isinstance(leaf, Tensor) else None

    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    return {name: pytree.tree_map(free, value) for name, value in bound.arguments.items()}


def refused(model: nn.Module, error: Exception) -> ModelError:
    """The error for a network that an exporter does not take."""
    first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ModelError(
        f"the exporter must accept the network, by default with a free batch size. Got {type(error).__name__} for "
        f"{type(model).__name__}: {first_line.strip()}. If its forward() fixes the batch size, pass "
        "dynamic_batch=False."
    )
