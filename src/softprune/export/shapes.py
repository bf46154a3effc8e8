"""Which dimensions of an export are free: the first one of every input, the batch."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from softprune.errors import ModelError
from softprune.graph import Example

TRACED_BATCH = 2
"""Batch size of the export: torch.export takes a size of one for a constant."""
MOST_ON_GPU = 65535
"""Largest batch that cuDNN's BatchNorm takes: PyTorch asks for it while a network on a GPU is traced."""


def exportable(model: nn.Module, example: Example, *, dynamic_batch: bool) -> Example:
    """The example at a batch size that an export of `model` with a free batch can start from."""
    if not dynamic_batch:
        return example
    batch = example.batch_size()
    if batch is None:
        raise ModelError(
            "a free batch size needs inputs that all have the batch as their first dimension. Got first dimensions "
            f"{[tuple(tensor.shape)[:1] for tensor in example.tensors()]}; pass dynamic_batch=False."
        )
    if batch > 1:
        return example
    more = example.with_batch(TRACED_BATCH)
    if not _runs(copy.deepcopy(model), more) and _runs(copy.deepcopy(model), example):
        raise ModelError(
            f"a free batch size may be any. Got a {type(model).__name__} that takes one input and does not take "
            f"{TRACED_BATCH}; pass dynamic_batch=False."
        )
    return more


@torch.no_grad()
def _runs(model: nn.Module, example: Example) -> bool:
    given = example.map(torch.clone)
    try:
        model(*given.args, **given.kwargs)
    except Exception:
        return False
    return True


def dynamic_shapes(model: nn.Module, example: Example, *, dynamic_batch: bool) -> dict[str, Any] | None:
    """torch.export's description of the free dimensions, by the names of the forward's parameters."""
    if not dynamic_batch:
        return None
    on_gpu = any(tensor.is_cuda for tensor in example.tensors())
    batch = torch.export.Dim("batch", min=1, max=MOST_ON_GPU if on_gpu else None)

    def free(leaf: Any) -> Any:
        return {0: batch} if isinstance(leaf, Tensor) else None

    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    return {name: pytree.tree_map(free, value) for name, value in bound.arguments.items()}
