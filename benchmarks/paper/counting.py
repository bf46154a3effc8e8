"""How the authors of SCP count the networks of their paper, for the columns ``paper_*`` of results/runs.csv.

FLOPs are ``2 * positions * (k * k * inputs + 1) * outputs`` for a convolution and ``2 * (inputs - 1) * classes`` for
the classifier. It is not what a cut network costs: in the ResNets and the DenseNet a BatchNorm in front of a mask
counts in full, and the rules below name the other differences. The post-activation ResNets are counted as SFP and FPGM
do, whose figures the paper quotes: multiply-accumulates of convolutions alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from softprune import cost, models
from softprune.graph import ExampleLike


@dataclass(frozen=True)
class Counted:
    """What a network, or a module of it, costs."""

    flops: int = 0
    params: int = 0
    channels: int = 0


class PaperCounter:
    """Counts one of the paper's networks for the numbers of channels that masks keep. Modules stand in `rows`."""

    def __init__(self, model: nn.Module, example: ExampleLike) -> None:
        self.model = model
        self.modules: dict[str, Any] = dict(model.named_modules())
        # Every weight works once per output position, so the exact count tells the size of every output.
        self.positions = {
            name: part.macs // self.modules[name].weight.numel()
            for name, part in cost(model, example).by_module.items()
            if part.kind == "Conv2d"
        }
        self.rows: dict[str, Counted] = {}
        self._kept: Mapping[str, int] = {}

    def count(self, kept: Mapping[str, int] | None = None) -> Counted:
        """Return the total where the BatchNorms named in `kept` keep so many channels, and the others all."""
        self._kept, self.rows = kept or {}, {}
        if isinstance(self.model, models.VGG):
            self._vgg()
        elif isinstance(self.model, models.DenseNet):
            self._densenet()
        elif isinstance(self.model, models.BottleneckResNet):
            self._residual(norms=3, whole_in_first_block=False)
        elif isinstance(self.model, models.PreActResNet):
            self._residual(norms=2, whole_in_first_block=True)
        elif isinstance(self.model, models.OptionAResNet):
            self._option_a()
        else:
            raise ValueError(f"the paper has no rule for {type(self.model).__name__}")
        rows = self.rows.values()
        return Counted(sum(r.flops for r in rows), sum(r.params for r in rows), sum(r.channels for r in rows))

    # --- what the rules read and write -----------------------------------------------------------------------------

    def kept(self, name: str) -> int:
        """Return how many channels of a BatchNorm its mask keeps."""
        return self._kept.get(name, self.width(name))

    def width(self, name: str) -> int:
        return int(self.modules[name].num_features)

    def children(self, *names: str) -> list[str]:
        return [f"{name}.{child}" for name in names for child, _ in self.modules[name].named_children()]

    def norm(self, name: str, *, counted: int, channels: int) -> None:
        """Count a BatchNorm with parameters for `counted` channels, of which `channels` enter the channel count."""
        self.rows[name] = Counted(params=2 * counted, channels=channels)

    def conv(self, name: str, inputs: int, outputs: int) -> None:
        """Count a bias-free convolution from `inputs` to `outputs` channels."""
        kernel = math.prod(self.modules[name].kernel_size)
        flops = 2 * self.positions[name] * (kernel * inputs + 1) * outputs
        self.rows[name] = Counted(flops, kernel * inputs * outputs)

    def full_conv(self, name: str) -> int:
        """Count a convolution that no mask narrows, and return its outputs."""
        conv = self.modules[name]
        self.conv(name, conv.in_channels, conv.out_channels)
        return int(conv.out_channels)

    def classifier(self, inputs: int) -> None:
        """Count the linear layer with bias. With no input left its FLOPs are negative, as in the authors' code."""
        classes = self.modules["classifier"].out_features
        self.rows["classifier"] = Counted(2 * (inputs - 1) * classes, (inputs + 1) * classes)

    # --- the rules -------------------------------------------------------------------------------------------------

    def _vgg(self) -> None:
        """Every unit is cut on both sides: the count is that of the cut network, but for the +1 terms."""
        units = self.children(*self.children("stages"))
        inputs = self.modules[f"{units[0]}.conv"].in_channels
        for unit in units:
            outputs = self.kept(f"{unit}.bn")
            self.conv(f"{unit}.conv", inputs, outputs)
            self.norm(f"{unit}.bn", counted=outputs, channels=outputs)
            inputs = outputs
        self.classifier(inputs)

    def _densenet(self) -> None:
        """A mask narrows the input of the convolution after it; BatchNorms and outputs count in full."""
        stream = self.full_conv("stem")
        transitions = self.children("transitions")
        for index, block in enumerate(self.children("blocks")):
            if index > 0:
                stream = self._reader(transitions[index - 1], stream)
            for layer in self.children(block):
                stream += self._reader(layer, stream)
        self._head(stream)

    def _reader(self, name: str, stream: int) -> int:
        """Count BatchNorm, mask and convolution, and return the convolution's outputs."""
        kept, outputs = self.kept(f"{name}.bn"), self.modules[f"{name}.conv"].out_channels
        self.norm(f"{name}.bn", counted=stream, channels=kept)
        self.conv(f"{name}.conv", kept, outputs)
        return int(outputs)

    def _head(self, stream: int) -> None:
        self.norm("bn", counted=stream, channels=self.kept("bn"))
        self.classifier(self.kept("bn"))

    def _residual(self, norms: int, *, whole_in_first_block: bool) -> None:
        """Pre-activation blocks of `norms` pairs of BatchNorm and convolution.

        A block whose masks leave nothing of one of its BatchNorms counts as nothing, also where its constant would
        survive. Stem and projections always count in full. In the first basic block of a stage only the second
        BatchNorm is masked, the outputs of the first convolution are not reduced by that mask
        (`whole_in_first_block`), and a dead branch drops the first BatchNorm from the count although the shortcut
        reads it. For bottlenecks the authors released no code: these are their rules for basic blocks.
        """
        stream = self.full_conv("stem")
        for stage in self.children("stages"):
            for index, block in enumerate(self.children(stage)):
                pairs = [(f"{block}.bn{number}", f"{block}.conv{number}") for number in range(1, norms + 1)]
                kept = [self.kept(norm) for norm, _ in pairs]
                outputs = [*kept[1:], int(self.modules[pairs[-1][1]].out_channels)]
                if whole_in_first_block and index == 0:
                    outputs[0] = self.width(pairs[1][0])
                if 0 not in kept:
                    for (norm, conv), inputs, out in zip(pairs, kept, outputs, strict=True):
                        self.norm(norm, counted=stream if norm == pairs[0][0] else inputs, channels=inputs)
                        self.conv(conv, inputs, out)
                if f"{block}.project" in self.modules:
                    self.full_conv(f"{block}.project")
                stream = outputs[-1]
        self._head(stream)

    def _option_a(self) -> None:
        """Post-activation basic blocks as SFP and FPGM count them.

        Every convolution loses its own zeroed filters, also where the shortcut's zeros would have to be put in between.
        The stream between blocks counts in full, except for the first block, which reads the stem.
        """
        inputs = self.kept("bn")
        self.conv("stem", self.modules["stem"].in_channels, inputs)
        self.norm("bn", counted=inputs, channels=inputs)
        for block in self.children(*self.children("stages")):
            for number in (1, 2):
                outputs = self.kept(f"{block}.bn{number}")
                self.conv(f"{block}.conv{number}", inputs, outputs)
                self.norm(f"{block}.bn{number}", counted=outputs, channels=outputs)
                inputs = outputs
            inputs = self.width(f"{block}.bn2")
        self.classifier(inputs)
        for name, row in self.rows.items():  # multiply-accumulates of convolutions alone
            flops = self.positions.get(name, 0) * row.params
            self.rows[name] = Counted(flops, row.params, row.channels)
