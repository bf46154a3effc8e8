"""Fuse a network and verify the result. Three rewrites: epilogues, first convolutions, odd widths."""

import warnings
from collections.abc import Iterator, Mapping
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from softprune.cut.comparison import compare as distance
from softprune.cut.comparison import outputs_of
from softprune.errors import ConfigError, VerificationError
from softprune.export.checking import TOLERANCES, cast, compare_outputs, exact, place_of, precisions, prepared, trials
from softprune.export.folding import fold_batch_norms
from softprune.export.writing import export_error, exportable, exported
from softprune.fused.inference.convolutions import ConvolutionGraph, FusableConvolution
from softprune.graph import Example, ExampleLike
from softprune.hardware import IMAGE_CHANNELS, alignment_padding
from softprune.log import get_logger
from softprune.module_state import state_kept

logger = get_logger(__name__)

_aten = torch.ops.aten
_RELU = torch.ops.aten.relu.default
_ADD = torch.ops.aten.add.Tensor


def fuse_epilogues(network: ConvolutionGraph) -> int:
    """Fuse convolutions with the addition and the ReLU that alone read them. Return their number."""
    taken = 0
    for relu in [node for node in network.graph.nodes if node.target is _RELU]:
        source = relu.args[0]
        if _is_sum(source):
            taken += _fuse_sum(network, relu, source)
            continue
        convolution = _read_once(network, source)
        if convolution is not None:
            convolution.replace(relu, relu=True)
            taken += 1
    return taken


def _fuse_sum(network: ConvolutionGraph, relu: Node, add: Node) -> int:
    terms = [term for term in add.args if isinstance(term, Node)]
    values = [term.meta["val"] for term in terms]
    if len(set(terms)) != 2 or values[0].shape != values[1].shape or values[0].dtype != values[1].dtype:
        return 0
    # The later of two convolutions adds, because the result of the other one is available then.
    order = {node: place for place, node in enumerate(network.graph.nodes)}
    terms.sort(key=order.__getitem__, reverse=True)
    for term, other in (terms, reversed(terms)):
        convolution = _read_once(network, term)
        if convolution is None:
            continue
        # The bias of the shortcut would need a kernel of its own. Add it to the bias of this convolution.
        bias = convolution.bias
        shortcut = _read_once(network, other)
        if shortcut is not None and shortcut.bias is not None:
            bias = shortcut.bias if bias is None else bias + shortcut.bias
            other.update_arg(2, None)
        convolution.replace(relu, bias=bias, other=other, relu=True)
        return 1
    return 0


def _read_once(network: ConvolutionGraph, node: object) -> FusableConvolution | None:
    """Return `node` as a plain convolution if exactly one operator reads it.

    Depthwise convolutions are left alone: PyTorch has special kernels for them.
    """
    found = network.convolution(node)
    if found is None or found.fused or len(found.node.users) != 1:
        return None
    return None if found.groups > 1 and found.weight.shape[1] == 1 else found


def _is_sum(node: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.target is _ADD and not node.kwargs and len(node.users) == 1


def read_in_blocks(network: ConvolutionGraph) -> int:
    """Let first convolutions of stride two read 2x2 blocks of pixels as channels. Return the number of convolutions.

    Tensor cores process channels in groups of eight, and three colours leave most of a group empty. With each 2x2 block
    as one pixel of four times the channels the stride is one and the kernel has a quarter of the taps. Products and
    sums stay the same.
    """
    done = 0
    for convolution in network.convolutions():
        stride, _, dilation, groups = convolution.steps
        inputs, *kernel = convolution.weight.shape[1:]
        size = convolution.image.meta["val"].shape[2:]
        if (stride, dilation, groups) != ([2, 2], [1, 1], 1) or inputs > IMAGE_CHANNELS or min(kernel) < 3:
            continue
        if not all(isinstance(length, int) for length in size):
            continue
        _rewrite(convolution, [int(length) for length in size])
        done += 1
    return done


def _rewrite(convolution: FusableConvolution, size: list[int]) -> None:
    graph, weight = convolution.network.graph, convolution.weight
    # Pad the kernel with zeros until kernel and leading padding consist of whole blocks.
    front = [pad % 2 for pad in convolution.steps[1]]
    taps = [-(-(length + more) // 2) for length, more in zip(weight.shape[2:], front, strict=True)]
    after = [2 * count - length - more for count, length, more in zip(taps, weight.shape[2:], front, strict=True)]
    wide = F.pad(weight, (front[1], after[1], front[0], after[0]))
    outputs, inputs = weight.shape[:2]
    blocks = wide.view(outputs, inputs, taps[0], 2, taps[1], 2).permute(0, 1, 3, 5, 2, 4)
    blocks = blocks.reshape(outputs, 4 * inputs, *taps)
    more = alignment_padding(4 * inputs)
    result = convolution.node.meta["val"].shape[2:]
    counts = [int(length) + count - 1 for length, count in zip(result, taps, strict=True)]
    edges = []
    for side in (1, 0):
        before = convolution.steps[1][side] + front[side]
        edges += [before, 2 * counts[side] - size[side] - before]
    with graph.inserting_before(convolution.node):
        batch = graph.call_function(_aten.sym_size.int, (convolution.image, 0))
        image = graph.call_function(_aten.pad.default, (convolution.image, edges))
        image = graph.call_function(_aten.pixel_unshuffle.default, (image, 2))
        # pixel_unshuffle does not reshape an empty batch. For other batches this view does nothing.
        image = graph.call_function(_aten.view.default, (image, [batch, 4 * inputs, *counts]))
        image = graph.call_function(_aten.pad.default, (image, [0, 0, 0, 0, 0, more]))
    steps = ([1, 1], [0, 0], [1, 1], 1)
    convolution.replace(image=image, weight=F.pad(blocks, (0, 0, 0, 0, 0, more)), steps=steps)


ZEROS_STAY = (_aten.relu.default, _aten.max_pool2d.default, _aten.avg_pool2d.default, _aten.clone.default)
"""Operators that map a channel of zeros to zeros. Dropout in eval mode is a clone."""


def pad_odd_widths(network: ConvolutionGraph) -> int:
    """Pad odd widths between convolutions to multiples of eight. Return the number of padded widths.

    Only between convolutions: one writes zeros to the added channels, and those that read them multiply by zero.
    """
    done = 0
    while (found := next(_odd(network), None)) is not None:
        convolution, readers = found
        more = alignment_padding(convolution.weight.shape[0])
        for reader in readers:
            reader.replace(weight=F.pad(reader.weight, (0, 0, 0, 0, 0, more)))
        bias = convolution.bias
        convolution.replace(
            weight=F.pad(convolution.weight, (0, 0, 0, 0, 0, 0, 0, more)),
            bias=None if bias is None else F.pad(bias, (0, more)),
        )
        done += 1
    return done


def _odd(network: ConvolutionGraph) -> Iterator[tuple[FusableConvolution, list[FusableConvolution]]]:
    """Yield convolutions of odd width that only convolutions read, with these readers."""
    for convolution in network.convolutions():
        if alignment_padding(convolution.weight.shape[0]) and convolution.groups == 1 and convolution.other is None:
            readers = _readers(network, convolution.node)
            if readers:
                yield convolution, readers


def _readers(network: ConvolutionGraph, node: Node) -> list[FusableConvolution]:
    """Return the convolutions that read `node`, or an empty list if anything else reads it."""
    found = []
    for user in node.users:
        if user.target in ZEROS_STAY:
            further = _readers(network, user)
            if not further:
                return []
            found += further
            continue
        reader = network.convolution(user)
        if reader is None or reader.groups != 1 or reader.image is not node or reader.other is node:
            return []
        found.append(reader)
    return found


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
    with state_kept(made):
        compare_outputs(wide, lambda attempt: outputs_of(made, attempt), attempts, what="A fused network")
    if dtype is not None:
        narrow = cast(narrow, dtype)
    if precisions(narrow) != precisions(wide):
        values = {name: tensor.detach().clone() for name, tensor in folded.state_dict().items()}
        folded = cast(folded, precisions(narrow))
        made = _fused(folded, given.to_model(narrow), values, **settings)
        with state_kept(made):
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
    for node in network.graph.nodes:
        if node.target is _aten.view.default:  # it fails on inputs in another memory format than the example's
            node.target = _aten.reshape.default
    done = fuse_epilogues(network), read_in_blocks(network), pad_odd_widths(network)
    logger.debug("fused %d epilogues, %d first convolutions, %d odd widths", *done)
    for convolution in network.convolutions() if channels_last else ():
        weight = network.stored(convolution.node.args[1])
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
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
