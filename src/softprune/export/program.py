"""torch.export of a network: which dimensions are dynamic, the exported program, and errors in plain words."""

import copy
import inspect
import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from softprune.errors import ModelError, first_line
from softprune.graph import Example

TRACED_BATCH = 2
"""Batch size of the trace. torch.export treats a size of one as a constant."""
MOST_ON_GPU = 65535
"""Largest batch that BatchNorm in cuDNN accepts. PyTorch checks it while it traces a network on a GPU."""


# How torch.export reports a dimension that was declared dynamic and is not.
_CONSTRAINT = re.compile(
    r"Constraints? ?violat|ConstraintViolation|as dynamic but|dynamic[ _]shapes?|specialized|tree_name", re.IGNORECASE
)


def exportable(model: nn.Module, example: Example, *, dynamic_batch: bool) -> Example:
    """Return the example at a batch size from which `model` can be exported with a dynamic batch."""
    if not dynamic_batch:
        return example
    batch = example.batch_size()
    if batch is None:
        raise ModelError(
            "A dynamic batch size needs inputs whose first dimension is the batch. Got first dimensions "
            f"{[tuple(tensor.shape)[:1] for tensor in example.tensors()]}. Pass dynamic_batch=False."
        )
    if batch > 1:
        return example
    more = example.with_batch(TRACED_BATCH)
    if not _runs(copy.deepcopy(model), more) and _runs(copy.deepcopy(model), example):
        raise ModelError(
            f"A network with a dynamic batch size must accept any. Got a {type(model).__name__} that accepts a "
            f"batch of 1 and not of {TRACED_BATCH}. Pass dynamic_batch=False."
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
    """Return the dynamic dimensions for torch.export by parameter name of forward(), or None for fixed ones."""
    if not dynamic_batch:
        return None
    on_gpu = any(tensor.is_cuda for tensor in example.tensors())
    batch = torch.export.Dim("batch", min=1, max=MOST_ON_GPU if on_gpu else None)

    def dynamic(leaf: Any) -> Any:
        return {0: batch} if isinstance(leaf, Tensor) else None

    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    return {name: pytree.tree_map(dynamic, value) for name, value in bound.arguments.items()}


def exported(model: nn.Module, given: Example, *, dynamic_batch: bool) -> torch.export.ExportedProgram:
    """Return the exported program of `model`. Raise a ModelError with the cause where torch.export fails."""
    shapes = dynamic_shapes(model, given, dynamic_batch=dynamic_batch)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(model, given.args, given.kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise export_error(model, error) from error


def export_error(model: nn.Module, error: BaseException) -> ModelError:
    """Return the error for a network that an exporter rejects, with the root cause of the exporter's error."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    about_the_batch = any(_CONSTRAINT.search(f"{type(each).__name__}: {each}") for each in chain)
    hint = " Its forward() seems to fix the batch size. Pass dynamic_batch=False." if about_the_batch else ""
    return ModelError(
        f"The exporter must accept the network. Got {type(chain[-1]).__name__} for {type(model).__name__}: "
        f"{first_line(chain[-1])}.{hint}"
    )
