"""Widths that are no whole multiple, as networks have them once they are cut, widened by channels of zeros.

Only between convolutions, where nobody sees the added channels: a convolution writes zeros there, and those behind it
multiply them by zeros.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.fx import Node

from softprune.fused.inference.network import Convolution, Network
from softprune.hardware import alignment_padding

_aten = torch.ops.aten
ZEROS_STAY = (_aten.relu.default, _aten.max_pool2d.default, _aten.avg_pool2d.default, _aten.clone.default)
"""Operators on each channel by itself that make zeros of zeros; a dropout is a clone in eval mode."""


def widen(network: Network) -> int:
    """Bring odd widths between convolutions to whole multiples; returns how many there were."""
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


def _odd(network: Network) -> Iterator[tuple[Convolution, list[Convolution]]]:
    """Convolutions of odd width that only convolutions read, with these."""
    for convolution in network.convolutions():
        if (
            alignment_padding(convolution.weight.shape[0])
            and convolution.groups == 1
            and convolution.other is None
        ):
            readers = _readers(network, convolution.node)
            if readers:
                yield convolution, readers


def _readers(network: Network, node: Node) -> list[Convolution]:
    """The convolutions that read it, if none but such do."""
    found = []
    for user in node.users:
        if user.target in ZEROS_STAY:
            behind = _readers(network, user)
            if not behind:
                return []
            found += behind
            continue
        reader = network.convolution(user)
        if reader is None or reader.groups != 1 or reader.image is not node or reader.other is node:
            return []
        found.append(reader)
    return found
