"""Write a network to a file: export it, run it in its runtime, compare the outputs, then write.

A file is serialised in memory, because writers of other libraries may end the process when the disk is full.
"""

import copy
import inspect
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from softprune.cut.verify import Comparison
from softprune.errors import ConfigError, ModelError, SoftpruneError, first_line
from softprune.export.checking import compare_outputs, prepared, trials
from softprune.export.folding import count_batch_norms, fold_batch_norms
from softprune.graph import Example, ExampleLike
from softprune.io import write_atomically
from softprune.log import get_logger

logger = get_logger(__name__)

TRACED_BATCH = 2
"""Batch size of the trace. torch.export treats a size of one as a constant."""
MOST_ON_GPU = 65535
"""Largest batch that BatchNorm in cuDNN accepts. PyTorch checks it while it traces a network on a GPU."""
IMAGE_CHANNELS = 4
"""An input with at most this many channels is an image, whose channels are never cut."""
WIDTH_MULTIPLE = 8
"""Convolutions with widths that are no multiples of this are slow on tensor cores, depthwise ones on CPUs, too."""


def odd_widths(model: nn.Module) -> tuple[int, int]:
    """Return how many convolutions have widths that are no multiples, and how many depthwise ones."""
    found = [0, 0]
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            depthwise = module.groups > 1 and module.groups == module.in_channels
            # The channels of an image are never cut.
            widths = [module.out_channels, module.in_channels if module.in_channels > IMAGE_CHANNELS else 0]
            found[depthwise] += any(width % WIDTH_MULTIPLE for width in widths)
    return found[0], found[1]


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


@dataclass(frozen=True, kw_only=True)
class ExportReport(Comparison):
    """A file that was written and verified. Prints as one line."""

    path: Path
    format: str
    """"onnx" or "pt2"."""
    bytes: int
    """Size of the file."""
    runtime: str
    """The runtime of the verification, with its version."""
    folded: int = 0
    """Number of BatchNorms folded into the layer before them."""

    def __str__(self) -> str:
        folded = f", {self.folded} BatchNorms folded" if self.folded else ""
        return (
            f"{self.path}: {self.bytes:,} bytes{folded}; {self.runtime} differs by at most "
            f"{self.max_difference:.1e} at output scale {self.scale:.1e} (inputs {'; '.join(self.inputs)})"
        )

    __repr__ = __str__  # what a notebook shows


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
    if slow := odd_widths(network)[1]:
        logger.warning(
            "softprune: %d depthwise convolutions have widths that are no multiples of %d, for which %s has no fast "
            "kernels: cut with round_to=%d",
            *(slow, WIDTH_MULTIPLE, kind.runtime.partition(" ")[0], WIDTH_MULTIPLE),
        )
    write_atomically(target, content, then="export again")
    return ExportReport(
        path=target,
        format=kind.suffix,
        bytes=len(content),
        runtime=kind.runtime,
        **vars(comparison),
        folded=count_batch_norms(network) - count_batch_norms(small),
    )
