"""From a network to a file: made in memory, run in its own runtime, compared, and only then written.

In memory, since writers of other libraries may end the whole process where a disk is full.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError, SoftpruneError
from softprune.export.checking import compare, prepared, trials
from softprune.export.folding import count_batch_norms, fold_batch_norms
from softprune.export.program import refused
from softprune.export.report import ExportReport
from softprune.export.shapes import exportable
from softprune.graph import Example, ExampleLike
from softprune.io import write_atomically

Runtime = Callable[[Example], Sequence[Tensor]]
"""A file's content as something to call."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """What a kind of file has of its own."""

    suffix: str
    """Of its files, without the full stop."""
    what: str
    """What messages call it."""
    runtime: str
    """What runs it for the check, with its version."""
    content: Callable[[nn.Module, Example], bytes]
    """The file of a network that is called so."""
    open: Callable[[bytes], Runtime]
    """A file made ready to run."""


def write_checked(
    kind: Format,
    model: nn.Module,
    example: ExampleLike,
    path: str | os.PathLike[str],
    *,
    fold_bn: bool,
    dynamic_batch: bool,
    tolerance: float | None,
) -> ExportReport:
    """Write `model` as a file of that kind, once the file computes what `model` does."""
    target = Path(path)
    if target.suffix != f".{kind.suffix}":
        raise ConfigError(f"the file's name must end in .{kind.suffix}. Got {str(target)!r}.")
    network = prepared(model)
    given = exportable(network, Example.of(example).to_model(network), dynamic_batch=dynamic_batch)
    small = fold_batch_norms(network, given) if fold_bn else network
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of exporters, about themselves
        try:
            content = kind.content(small, given)
            runtime = kind.open(content)
        except SoftpruneError:
            raise
        except Exception as error:  # exporters and runtimes have a class for every failure
            raise refused(small, error) from error
        attempts = trials(given, other_batch=dynamic_batch)
        comparison = compare(network, runtime, attempts, what=kind.what, tolerance=tolerance)
    write_atomically(target, content, then="export again")
    return ExportReport(
        path=target,
        format=kind.suffix,
        bytes=len(content),
        runtime=kind.runtime,
        max_difference=comparison.max_difference,
        scale=comparison.scale,
        inputs=comparison.inputs,
        folded=count_batch_norms(network) - count_batch_norms(small),
    )
