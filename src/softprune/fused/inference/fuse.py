"""Fuse a network and verify the result."""

import logging
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from softprune.errors import ConfigError, VerificationError
from softprune.export.checking import (
    TOLERANCES,
    cast,
    compare_outputs,
    exact,
    place_of,
    precisions,
    prepared,
    restored_buffers,
    trials,
)
from softprune.export.folding import fold_batch_norms
from softprune.export.writing import export_error, exportable, exported
from softprune.fused.inference.convolutions import ConvolutionGraph
from softprune.fused.inference.rewrites import fuse_epilogues, pad_odd_widths, read_in_blocks
from softprune.graph import Example, ExampleLike
from softprune.surgery.comparison import compare as distance
from softprune.surgery.comparison import outputs_of

logger = logging.getLogger(__name__)


def fuse(
    model: nn.Module, example: ExampleLike, *, dtype: torch.dtype | None = None, dynamic_batch: bool = True
) -> GraphModule:
    """Return a new module for inference that computes what `model` does with fewer and faster operations.

    BatchNorms are folded, convolutions include the addition and the ReLU after them, a first convolution of stride two
    reads 2x2 blocks of pixels, and odd widths between convolutions are padded to multiples of eight. It is made for
    half precision on NVIDIA GPUs with ``torch.compile(fused, mode="reduce-overhead")``. The result is correct on every
    device.

    The rewrites are verified in float64, or in the precision of the network if it runs in no other; the log says so.
    Weights are computed in float64 and rounded once: pass the network in full precision, and its final precision as
    `dtype`.

    Args:
        model: A network without masks, such as a compact network, on its device and in its memory format. It is not
            changed.
        example: An input: a tensor, a tuple of arguments, or (args, kwargs). The result accepts only its image size.
        dtype: The precision of the result. By default every weight keeps its own.
        dynamic_batch: Accept any batch size.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"`dtype` must be a floating dtype of torch, such as torch.bfloat16. Got {dtype!r}.")
    device, _ = place_of(model)
    narrow = prepared(model, device=device)
    given = exportable(narrow, Example.of(example).to_model(narrow), dynamic_batch=dynamic_batch)
    wide, wide_given = exact(narrow, given)
    folded = fold_batch_norms(wide, wide_given)
    settings = {"dynamic_batch": dynamic_batch, "channels_last": _is_channels_last(model)}
    made = _fused(folded, wide_given, {}, **settings)
    attempts = trials(wide_given, other_batch=dynamic_batch)
    with restored_buffers(made):
        compare_outputs(wide, lambda attempt: outputs_of(made, attempt), attempts, what="A fused network")
    if dtype is not None:
        narrow = cast(narrow, dtype)
    if precisions(narrow) != precisions(wide):
        values = {name: tensor.detach().clone() for name, tensor in folded.state_dict().items()}
        folded = cast(folded, precisions(narrow))
        made = _fused(folded, given.to_model(narrow), values, **settings)
        with restored_buffers(made):
            _check_rounded(wide, wide_given, narrow, made)
    return made


@torch.no_grad()
def _fused(
    model: nn.Module, given: Example, values: Mapping[str, Tensor], *, dynamic_batch: bool, channels_last: bool
) -> GraphModule:
    program = exported(model, given, dynamic_batch=dynamic_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Remove in-place operations and decompose nothing else.
            module = program.run_decompositions({}).module()
        except Exception as error:
            raise export_error(model, error) from error
    network = ConvolutionGraph(module, values)
    network.views_to_reshapes()
    done = fuse_epilogues(network), read_in_blocks(network), pad_odd_widths(network)
    logger.debug("fused %d epilogues, %d first convolutions, %d odd widths", *done)
    if channels_last:
        network.to_channels_last()
    return network.rebuilt()


def _check_rounded(wide: nn.Module, given: Example, narrow: nn.Module, made: nn.Module) -> None:
    """Raise unless rounding costs the result at most twice what it costs the network."""
    expected = outputs_of(wide, given)
    usual = outputs_of(narrow, given.to_model(narrow))
    found = outputs_of(made, given.to_model(narrow))
    _, dtype = place_of(narrow)
    apart, size = distance(expected, found)
    theirs, scale = distance(expected, usual)
    allowed = max(TOLERANCES.get(dtype, 0.0), 2 * theirs / max(scale, 1e-30))
    if [tensor.dtype for tensor in found] != [tensor.dtype for tensor in usual] or not apart <= allowed * size:
        kinds = [", ".join(str(tensor.dtype) for tensor in outputs) for outputs in (found, usual)]
        raise VerificationError(
            f"A fused network must compute in {dtype} what the network computes, within {allowed:.2g} of its output. "
            f"Got a difference of {apart:.3g} at output scale {size:.3g}, and outputs of {kinds[0]} for {kinds[1]}. "
            "Use the network without fusion and report it."
        )


def _is_channels_last(model: nn.Module) -> bool:
    images = [tensor for tensor in model.parameters() if tensor.dim() == 4 and not tensor.is_contiguous()]
    return any(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in images)
