"""From a network to its fused form, checked."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from softprune.errors import ConfigError, VerificationError
from softprune.export.checking import (
    TOLERANCES,
    as_it_was,
    cast,
    compare,
    copied,
    exact,
    place_of,
    precisions,
    prepared,
    trials,
)
from softprune.export.folding import fold_batch_norms
from softprune.export.program import exported, refused
from softprune.export.shapes import exportable
from softprune.fused.inference.epilogues import take_along
from softprune.fused.inference.network import Network
from softprune.fused.inference.pairs import join
from softprune.fused.inference.stems import read_in_blocks
from softprune.fused.inference.widths import widen
from softprune.graph import Example, ExampleLike
from softprune.surgery.verify import compare as distance
from softprune.surgery.verify import outputs_of

logger = logging.getLogger(__name__)


def fuse(
    model: nn.Module, example: ExampleLike, *, dtype: torch.dtype | None = None, dynamic_batch: bool = True
) -> GraphModule:
    """A new module for inference that computes what `model` does in fewer and faster operations.

    BatchNorms are folded; convolutions take the addition and the ReLU behind them along; a first convolution in steps
    of two reads blocks of pixels; odd widths between convolutions become multiples of eight; narrow convolutions of
    single pixels into a wide stream and out of it are joined. It is made for half precision on NVIDIA GPUs and
    ``torch.compile(fused, mode="reduce-overhead")``; elsewhere the result is right, too.

    What is done is checked in float64 (in the network's own precision where it runs in no other, which the log says).
    The weights are worked out there, too, and rounded once: give the network in full precision, and the precision that
    it is to run in as `dtype`.

    Args:
        model: A compact network, or any other without masks, where and in the memory order that it is to run in; left
            as it was.
        example: What it is called with: a tensor, a tuple of arguments, or (args, kwargs). Its image size is the only
            one that the result takes.
        dtype: The precision of all of the result; by default every weight keeps its own.
        dynamic_batch: Leave the batch size free.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"`dtype` is a floating dtype of torch, such as torch.bfloat16. Got {dtype!r}.")
    device, _ = place_of(model)
    narrow = prepared(model, device=device)
    given = exportable(narrow, Example.of(example).to_model(narrow), dynamic_batch=dynamic_batch)
    wide, wide_given = exact(narrow, given)
    folded = fold_batch_norms(wide, wide_given)
    settings = {"dynamic_batch": dynamic_batch, "channels_last": _is_channels_last(model)}
    made = _fused(folded, wide_given, {}, **settings)
    attempts = trials(wide_given, other_batch=dynamic_batch)
    with as_it_was(made):
        compare(wide, lambda attempt: outputs_of(made, attempt), attempts, what="a fused network")
    if dtype is not None:
        narrow = cast(narrow, dtype)
    if precisions(narrow) != precisions(wide):
        values = {name: tensor.detach().clone() for name, tensor in folded.state_dict().items()}
        folded = cast(folded, precisions(narrow))
        made = _fused(folded, given.to_model(narrow), values, **settings)
        with as_it_was(made):
            _check_rounded(wide, wide_given, narrow, made)
    return made


@torch.no_grad()
def _fused(
    model: nn.Module,
    given: Example,
    values: Mapping[str, Tensor],
    *,
    dynamic_batch: bool,
    channels_last: bool,
) -> GraphModule:
    program = exported(model, given, dynamic_batch=dynamic_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Without in-place operations, and nothing else taken apart.
            module = program.run_decompositions({}).module()
        except Exception as error:
            raise refused(model, error) from error
    network = Network(module, values)
    network.take_any_memory_order()
    done = take_along(network), read_in_blocks(network), widen(network), join(network)
    logger.debug("%d epilogues, %d first convolutions, %d odd widths, %d joined", *done)
    if channels_last:
        network.to_channels_last()
    return network.rebuilt()


def _check_rounded(wide: nn.Module, given: Example, narrow: nn.Module, made: nn.Module) -> None:
    """In its own precision the result may be off by what rounding costs the network itself, and no more."""
    expected = outputs_of(wide, copied(given))
    usual = outputs_of(narrow, copied(given.to_model(narrow)))
    found = outputs_of(made, copied(given.to_model(narrow)))
    _, dtype = place_of(narrow)
    apart, size = distance(expected, found)
    theirs, scale = distance(expected, usual)
    allowed = max(TOLERANCES.get(dtype, 0.0), 2 * theirs / max(scale, 1e-30))
    if [tensor.dtype for tensor in found] != [
        tensor.dtype for tensor in usual
    ] or not apart <= allowed * size:
        kinds = [", ".join(str(tensor.dtype) for tensor in outputs) for outputs in (found, usual)]
        raise VerificationError(
            f"a fused network must compute in {dtype} what the network computes there, to {allowed:.2g} of its output. "
            f"Got a difference of {apart:.3g} at output scale {size:.3g}, and outputs of {kinds[0]} for {kinds[1]}. It "
            "was not kept; please report the network."
        )


def _is_channels_last(model: nn.Module) -> bool:
    images = [tensor for tensor in model.parameters() if tensor.dim() == 4 and not tensor.is_contiguous()]
    return any(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in images)
