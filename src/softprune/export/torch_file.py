"""torch.export's file (.pt2): the network without its Python class, for torch.export.load and AOTInductor."""

from __future__ import annotations

import io
import os

import torch
from torch import nn

from softprune.export.program import exported
from softprune.export.report import ExportReport
from softprune.export.writing import Format, Runtime, write_checked
from softprune.graph import ExampleLike
from softprune.surgery.verify import outputs_of


def to_torch_export(
    model: nn.Module,
    example: ExampleLike,
    path: str | os.PathLike[str],
    *,
    fold_bn: bool = False,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
) -> ExportReport:
    """Write `model` as a torch.export file, load it again and compare it with `model`.

    Args:
        model: A compact network, or any other without masks; left as it was. The file is for the CPU.
        example: What it is called with: a tensor, a tuple of arguments, or (args, kwargs).
        path: The file to write, ending in .pt2; an earlier one is replaced only by a file that passed the check.
        fold_bn: First fold BatchNorms into the layers before them.
        dynamic_batch: Leave the batch size free.
        tolerance: Largest difference allowed, relative to the largest output. [1e-4 in float32]
    """
    kind = Format(
        suffix="pt2",
        what="a .pt2 file",
        runtime=f"torch.export {torch.__version__}",
        content=lambda network, given: _content(exported(network, given, dynamic_batch=dynamic_batch)),
        open=_open,
    )
    return write_checked(
        kind, model, example, path, fold_bn=fold_bn, dynamic_batch=dynamic_batch, tolerance=tolerance
    )


def _content(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _open(content: bytes) -> Runtime:
    loaded = torch.export.load(io.BytesIO(content)).module()
    return lambda attempt: outputs_of(loaded, attempt)
