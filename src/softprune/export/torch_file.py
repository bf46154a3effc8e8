"""torch.export's file (.pt2): the network without its Python class, for torch.export.load and AOTInductor."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from softprune.errors import ConfigError
from softprune.export.checking import compare, prepared, trials
from softprune.export.folding import count_batch_norms, fold_batch_norms
from softprune.export.report import ExportReport
from softprune.export.shapes import dynamic_shapes, exportable, refused
from softprune.files import unwritable
from softprune.graph import Example, ExampleLike
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
    target = checked_path(path, ".pt2")
    network = prepared(model)
    norms = count_batch_norms(network)
    given = exportable(network, Example.of(example).to_model(network), dynamic_batch=dynamic_batch)
    small = fold_batch_norms(network, given) if fold_bn else network
    program = exported(small, given, dynamic_batch=dynamic_batch)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with folder_beside(target) as folder:
            written = folder / target.name
            torch.export.save(program, written)
            loaded = torch.export.load(written).module()

            attempts = trials(given, other_batch=dynamic_batch)
            comparison = compare(
                network,
                lambda attempt: outputs_of(loaded, attempt),
                attempts,
                what="a .pt2 file",
                tolerance=tolerance,
            )
            size = written.stat().st_size
            os.replace(written, target)
    return ExportReport(
        path=target,
        format="pt2",
        bytes=size,
        runtime=f"torch.export {torch.__version__}",
        max_difference=comparison.max_difference,
        scale=comparison.scale,
        inputs=comparison.inputs,
        folded=norms - count_batch_norms(small),
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


def checked_path(path: str | os.PathLike[str], suffix: str) -> Path:
    """The path as given, if it ends as it should."""
    target = Path(path)
    if target.suffix != suffix:
        raise ConfigError(f"the file's name must end in {suffix}. Got {str(target)!r}.")
    return target


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """A folder for a file under way, beside where it is to be, which is made; gone afterwards."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise unwritable(target, error, "export again") from error
    with made as folder:
        yield Path(folder)
