"""From a network to its fused form, checked."""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from softprune.export.checking import compare, prepared, tensors_of, trials
from softprune.export.folding import fold_batch_norms
from softprune.export.fusing.epilogues import take_along
from softprune.export.fusing.network import Network
from softprune.export.fusing.stems import read_in_blocks
from softprune.export.fusing.widths import widen
from softprune.export.shapes import exportable
from softprune.export.torch_file import exported
from softprune.graph import Example, ExampleLike

logger = logging.getLogger(__name__)


def fuse(model: nn.Module, example: ExampleLike, *, dynamic_batch: bool = True) -> GraphModule:
    """A new module for inference that computes what `model` does in fewer and faster operations.

    BatchNorms are folded; convolutions take the addition and the ReLU behind them along; the first one reads blocks of
    pixels; odd widths between convolutions become multiples of eight. The gain is in half precision on NVIDIA GPUs,
    best with ``torch.compile(fused, mode="reduce-overhead")``; elsewhere the result is right and no faster.

    The weights are worked out in float64 and rounded once; there the result is also checked against `model`.

    Args:
        model: A compact network, or any other without masks, where and in the precision and memory order that it is to
            run in; left as it was.
        example: What it is called with: a tensor, a tuple of arguments, or (args, kwargs). Its image size is the only
            one that the result takes.
        dynamic_batch: Leave the batch size free.
    """
    parameter = next(model.parameters(), torch.empty(0))
    network = prepared(model, device=str(parameter.device)).double()
    given = exportable(Example.of(example).to_model(network), dynamic_batch=dynamic_batch)
    fused = _fused(fold_batch_norms(network, given), given, dynamic_batch=dynamic_batch)

    def run(attempt: Example) -> list[Tensor]:
        with torch.no_grad():
            return tensors_of(fused(*attempt.args, **attempt.kwargs))

    compare(network, run, trials(given, other_batch=dynamic_batch), what="a fused network")
    fused = fused.to(parameter.dtype)
    if _is_channels_last(model):
        fused = fused.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return fused


@torch.no_grad()
def _fused(model: nn.Module, given: Example, *, dynamic_batch: bool) -> GraphModule:
    program = exported(model, given, dynamic_batch=dynamic_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Without in-place operations, and nothing else taken apart.
        network = Network(program.run_decompositions({}).module())
    done = take_along(network), read_in_blocks(network), widen(network)
    logger.debug("%d epilogues, %d first convolutions, %d odd widths", *done)
    return network.rebuilt()


def _is_channels_last(model: nn.Module) -> bool:
    images = [tensor for tensor in model.parameters() if tensor.dim() == 4 and not tensor.is_contiguous()]
    return any(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in images)
