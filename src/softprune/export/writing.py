"""Write a network to a file: serialise it in memory, run it in its runtime, compare the outputs, then write.

In memory, because writers of other libraries may end the process when the disk is full.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError, SoftpruneError
from softprune.export.checking import compare_outputs, prepared, trials
from softprune.export.folding import count_batch_norms, fold_batch_norms
from softprune.export.program import export_error, exportable
from softprune.graph import Example, ExampleLike
from softprune.io import write_atomically


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A file that was written and verified. Prints as one line."""

    path: Path
    format: str
    """"onnx" or "pt2"."""
    bytes: int
    """Size of the file."""
    runtime: str
    """The runtime of the verification, with its version."""
    max_difference: float
    """Largest |network - file| over all outputs and inputs."""
    scale: float
    """Largest |output| of the network."""
    inputs: tuple[str, ...]
    """Shapes of the inputs."""
    folded: int = 0
    """Number of BatchNorms folded into the layer before them."""

    def __str__(self) -> str:
        folded = f", {self.folded} BatchNorms folded" if self.folded else ""
        return (
            f"{self.path}: {self.bytes:,} bytes{folded}; {self.runtime} differs by at most "
            f"{self.max_difference:.1e} at output scale {self.scale:.1e} (inputs {'; '.join(self.inputs)})"
        )


Runtime = Callable[[Example], Sequence[Tensor]]
"""Runs a file on an input and returns its outputs."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format."""

    suffix: str
    """Suffix of the file name, without the dot."""
    what: str
    """Name of the format in messages."""
    runtime: str
    """The runtime with its version."""
    content: Callable[[nn.Module, Example], bytes]
    """Serialise a network with its example."""
    open: Callable[[bytes], Runtime]
    """Load the content of a file."""


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
    """Write `model` in the given format after verifying that the file computes what `model` does."""
    target = Path(path)
    if target.suffix != f".{kind.suffix}":
        raise ConfigError(f"The file name must end in .{kind.suffix}. Got {str(target)!r}. Rename it.")
    network = prepared(model)
    given = exportable(network, Example.of(example).to_model(network), dynamic_batch=dynamic_batch)
    small = fold_batch_norms(network, given) if fold_bn else network
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporters about themselves
        try:
            content = kind.content(small, given)
            runtime = kind.open(content)
        except SoftpruneError:
            raise
        except Exception as error:  # exporters and runtimes raise errors of many classes
            raise export_error(small, error) from error
        attempts = trials(given, other_batch=dynamic_batch)
        comparison = compare_outputs(network, runtime, attempts, what=kind.what, tolerance=tolerance)
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
