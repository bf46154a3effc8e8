"""torch.export's program of a network, or what it stumbled over."""

from __future__ import annotations

import re
import warnings

import torch
from torch import nn

from softprune.errors import ModelError, first_line
from softprune.export.shapes import dynamic_shapes
from softprune.graph import Example

# torch.export's words for a dimension that was to be free and is not.
_CONSTRAINT = re.compile(
    r"Constraints? ?violat|ConstraintViolation|as dynamic but|dynamic[ _]shapes?|specialized|tree_name",
    re.IGNORECASE,
)


def exported(model: nn.Module, given: Example, *, dynamic_batch: bool) -> torch.export.ExportedProgram:
    """torch.export's program of `model` in eval mode, or an error that says what it stumbled over."""
    shapes = dynamic_shapes(model, given, dynamic_batch=dynamic_batch)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(model, given.args, given.kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise refused(model, error) from error


def refused(model: nn.Module, error: BaseException) -> ModelError:
    """The error for a network that an exporter does not take: what it stumbled over, behind its own wrappings."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    about_the_batch = any(_CONSTRAINT.search(f"{type(each).__name__}: {each}") for each in chain)
    hint = " Its forward() seems to fix the batch size: pass dynamic_batch=False." if about_the_batch else ""
    return ModelError(
        f"the exporter must accept the network. Got {type(chain[-1]).__name__} for {type(model).__name__}: "
        f"{first_line(chain[-1])}.{hint}"
    )
