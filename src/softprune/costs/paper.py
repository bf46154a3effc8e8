"""`cost`, and the authors' own counting for the networks of the SCP paper, dense or under masks.

FLOPs are ``2 * positions * (k * k * inputs + 1) * outputs`` for a convolution and
``2 * (inputs - 1) * classes`` for the classifier. It is not what a cut network costs: in the ResNets and the
DenseNet a BatchNorm in front of a mask counts in full, and the rules below name the other differences. Use it
to compare with the paper's tables, and `count_exact` for everything else. The post-activation ResNets are counted
as SFP and FPGM do, whose figures the paper quotes: multiply-accumulates of convolutions alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.costs.exact import Cost, ModuleCost, count_exact
from softprune.errors import ConfigError
from softprune.graph.example import Example, ExampleLike

M = TypeVar("M", bound=nn.Module)


def cost(
    model: nn.Module,
    example: ExampleLike,
    *,
    counting: Literal["exact", "paper"] = "exact",
    masks: Mapping[str, Tensor] | None = None,
) -> Cost:
    """Count what `model` costs. Nothing is computed and the model is not changed.

    Args:
        model: Any model; for ``counting="paper"``, one of the SCP paper's networks from `softprune.models`.
        example: What the model is called with: a tensor, a tuple of arguments, or ``(args, kwargs)``.
        counting: ``"exact"`` counts multiply-accumulates of convolutions and linear layers on the operators
            that the forward runs in eval mode, per sample of the example (for the whole call where its tensors
            do not share their first dimension), and every parameter once. ``"paper"`` counts as the SCP authors.
        masks: For ``"paper"``, names of BatchNorms with boolean masks, True for a kept channel.

    Raises:
        ConfigError: if there is no rule for the model, or masks do not fit.
        ModelError: if the model does not run on the example.
    """
    if counting == "paper":
        return PaperCounter(model, example).count(masks)
    if counting != "exact":
        raise ConfigError(f'counting must be "exact" or "paper". Got {counting!r}.')
    if masks is not None:
        raise ConfigError(
            '`masks` needs counting="paper"; the exact cost is that of the model without masks. '
            'Got masks and counting="exact"; count the compact model instead.'
        )
    return count_exact(model, example)


class PaperCounter:
    """The authors' counting for many masks of one model, such as one count an epoch: the forward runs only once."""

    def __init__(self, model: nn.Module, example: ExampleLike) -> None:
        names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(model).__mro__)
        rules = [RULES[name] for name in names if name in RULES]
        if not rules:
            raise ConfigError(
                'counting="paper" has rules for the networks of the SCP paper only: vgg16, vgg19, resnet20, '
                "resnet56, resnet110, resnet164, densenet40, digits_net, resnet56_a and resnet110_a of "
                "softprune.models. "
                f'Got {type(model).__module__}.{type(model).__qualname__}. Use counting="exact".'
            )
        batch = Example.of(example).batch_size()
        if not batch:
            raise ConfigError(
                'counting="paper" needs an example that is one batch of images. Got an empty one, or several tensors.'
            )
        self._rule = rules[0]
        self._model = model
        # Every weight works once per output position, so the exact count tells the size of every output.
        self._positions = {
            name: part.macs // module.weight.numel()
            for name, part in count_exact(model, example).by_module.items()
            if isinstance(module := model.get_submodule(name), nn.Conv2d) and part.macs
        }

    def count(self, masks: Mapping[str, Tensor] | None = None) -> Cost:
        """Count under `masks`: names of BatchNorms with boolean tensors, True for a kept channel."""
        norms = {name: module for name, module in self._model.named_modules() if isinstance(module, _BatchNorm)}
        kept = {}
        for name, mask in (masks or {}).items():
            if name not in norms:
                raise ConfigError(
                    "A mask is named after the BatchNorm that it belongs to. "
                    f"Got {name!r}. The model's BatchNorms: {', '.join(norms)}."
                )
            width = norms[name].num_features
            if tuple(mask.shape) != (width,):
                raise ConfigError(
                    f"A mask has one entry per channel of its BatchNorm: {width} for {name!r}. "
                    f"Got shape {tuple(mask.shape)}."
                )
            kept[name] = int(mask.bool().sum())
        tally = _Tally(self._model, self._positions, kept)
        self._rule(tally)
        return Cost.total("paper", tally.rows)


class _Tally:
    """Reads the model and collects rows in the order of the forward."""

    def __init__(self, model: nn.Module, positions: Mapping[str, int], kept: Mapping[str, int]) -> None:
        self.model = model
        self.rows: dict[str, ModuleCost] = {}
        self._positions = positions
        self._kept = kept

    def module(self, name: str, kind: type[M]) -> M:
        """The module called `name`, as the dense network has it."""
        module = self.model.get_submodule(name)
        if not isinstance(module, kind):
            raise _cut_already(name, f"a {type(module).__name__}")
        return module

    def width(self, name: str) -> int:
        return self.module(name, _BatchNorm).num_features

    def kept(self, name: str) -> int:
        """Channels of a BatchNorm that its mask keeps."""
        return self._kept.get(name, self.width(name))

    def expect_width(self, name: str, stream: int) -> None:
        """Refuse a BatchNorm that reads less than the whole stream: then the network has been cut."""
        if self.width(name) != stream:
            raise _cut_already(name, f"{self.width(name)} of {stream} channels")

    def norm(self, name: str, *, counted: int, channels: int) -> None:
        """A BatchNorm with parameters for `counted` channels, of which `channels` enter the channel count."""
        self.rows[name] = ModuleCost(kind="BatchNorm2d", params=2 * counted, channels=channels)

    def conv(self, name: str, inputs: int, outputs: int) -> None:
        """A bias-free convolution from `inputs` to `outputs` channels."""
        kernel = math.prod(self.module(name, nn.Conv2d).kernel_size)
        if name not in self._positions:
            raise _cut_already(name, "a convolution that computes nothing")
        positions = self._positions[name]
        self.rows[name] = ModuleCost(
            kind="Conv2d",
            macs=positions * kernel * inputs * outputs,
            activations=positions * outputs,
            params=kernel * inputs * outputs,
            flops=2 * positions * (kernel * inputs + 1) * outputs,
        )

    def full_conv(self, name: str) -> None:
        """A convolution that no mask narrows."""
        conv = self.module(name, nn.Conv2d)
        self.conv(name, conv.in_channels, conv.out_channels)

    def classifier(self, name: str, inputs: int) -> None:
        """The linear layer with bias. With no input left its FLOPs are negative, as in the authors' code."""
        classes = self.module(name, nn.Linear).out_features
        self.rows[name] = ModuleCost(
            kind="Linear", macs=inputs * classes, params=(inputs + 1) * classes, flops=2 * (inputs - 1) * classes
        )

    def free(self, *names: str) -> None:
        """Modules of a dead branch: nothing is counted for them."""
        for name in names:
            self.rows[name] = ModuleCost(kind=type(self.model.get_submodule(name)).__name__)


def _cut_already(name: str, got: str) -> ConfigError:
    return ConfigError(
        "The paper's counting is defined on the dense network and its masks, not on a cut network. "
        f"Got {got} at {name!r}. Pass the dense network and masks={{BatchNorm name: mask}}."
    )


def _children(tally: _Tally, name: str) -> list[str]:
    return [f"{name}.{child}" for child, _ in tally.model.get_submodule(name).named_children()]


def _count_vgg(tally: _Tally) -> None:
    """Every unit is cut on both sides: the count is that of the cut network, but for the +1 terms."""
    units = [unit for stage in _children(tally, "stages") for unit in _children(tally, stage)]
    inputs = tally.module(f"{units[0]}.conv", nn.Conv2d).in_channels
    for unit in units:
        outputs = tally.kept(f"{unit}.bn")
        tally.conv(f"{unit}.conv", inputs, outputs)
        tally.norm(f"{unit}.bn", counted=outputs, channels=outputs)
        inputs = outputs
    tally.classifier("classifier", inputs)


def _count_densenet(tally: _Tally) -> None:
    """A mask narrows the input of the convolution after it; BatchNorms and outputs count in full."""
    tally.full_conv("stem")
    stream = tally.module("stem", nn.Conv2d).out_channels
    transitions = _children(tally, "transitions")
    for index, block in enumerate(_children(tally, "blocks")):
        if index > 0:
            stream = _count_reader(tally, transitions[index - 1], stream)
        for layer in _children(tally, block):
            stream += _count_reader(tally, layer, stream)
    _count_head(tally, stream)


def _count_reader(tally: _Tally, name: str, stream: int) -> int:
    """BatchNorm, mask, convolution; gives the convolution's outputs."""
    tally.expect_width(f"{name}.bn", stream)
    kept = tally.kept(f"{name}.bn")
    outputs = tally.module(f"{name}.conv", nn.Conv2d).out_channels
    tally.norm(f"{name}.bn", counted=stream, channels=kept)
    tally.conv(f"{name}.conv", kept, outputs)
    return outputs


def _count_head(tally: _Tally, stream: int) -> None:
    tally.expect_width("bn", stream)
    kept = tally.kept("bn")
    tally.norm("bn", counted=stream, channels=kept)
    tally.classifier("classifier", kept)


def _count_preact(tally: _Tally) -> None:
    """Basic blocks.

    A block whose masks leave nothing of one of its BatchNorms counts as nothing, also where its constant would
    survive. In the first block of a stage only the second BatchNorm is masked, the outputs of the first convolution
    are not reduced by that mask, and a dead branch drops the first BatchNorm from the count although the shortcut
    reads it. Stem and projections always count in full. A mask on the first BatchNorm of such a block, which the
    authors never have, narrows the input of its convolution.
    """
    _count_residual(tally, norms=2, whole_in_first_block=True)


def _count_bottleneck(tally: _Tally) -> None:
    """Bottleneck blocks, for which the authors released no code: their rules for basic blocks, carried over.

    The shortcut reads the raw input, so the first block of a stage has no rule of its own.
    """
    _count_residual(tally, norms=3, whole_in_first_block=False)


def _count_residual(tally: _Tally, norms: int, *, whole_in_first_block: bool) -> None:
    """Blocks of `norms` pairs of BatchNorm and convolution; `whole_in_first_block`: see :func:`_count_preact`."""
    tally.full_conv("stem")
    stream = tally.module("stem", nn.Conv2d).out_channels
    for index, block in (each for stage in _children(tally, "stages") for each in enumerate(_children(tally, stage))):
        pairs = [(f"{block}.bn{number}", f"{block}.conv{number}") for number in range(1, norms + 1)]
        tally.expect_width(pairs[0][0], stream)
        kept = [tally.kept(norm) for norm, _ in pairs]
        outputs = [*kept[1:], tally.module(pairs[-1][1], nn.Conv2d).out_channels]
        if whole_in_first_block and index == 0:
            outputs[0] = tally.width(pairs[1][0])
        if 0 in kept:
            tally.free(*(name for pair in pairs for name in pair))
        else:
            for (norm, conv), inputs, out in zip(pairs, kept, outputs, strict=True):
                tally.norm(norm, counted=stream if norm == pairs[0][0] else inputs, channels=inputs)
                tally.conv(conv, inputs, out)
        if f"{block}.project" in _children(tally, block):
            tally.full_conv(f"{block}.project")
        stream = outputs[-1]
    _count_head(tally, stream)


def _count_option_a(tally: _Tally) -> None:
    """Post-activation basic blocks as SFP and FPGM count them.

    Every convolution loses its own zeroed filters, also where the shortcut's zeros would have to be put in between.
    The stream between blocks counts in full, except for the first block, which reads the stem.
    """
    inputs = tally.kept("bn")
    tally.conv("stem", tally.module("stem", nn.Conv2d).in_channels, inputs)
    tally.norm("bn", counted=inputs, channels=inputs)
    for block in [block for stage in _children(tally, "stages") for block in _children(tally, stage)]:
        inner, outer = tally.kept(f"{block}.bn1"), tally.kept(f"{block}.bn2")
        tally.conv(f"{block}.conv1", inputs, inner)
        tally.norm(f"{block}.bn1", counted=inner, channels=inner)
        tally.conv(f"{block}.conv2", inner, outer)
        tally.norm(f"{block}.bn2", counted=outer, channels=outer)
        inputs = tally.width(f"{block}.bn2")
    tally.classifier("classifier", inputs)
    for name, row in tally.rows.items():
        tally.rows[name] = replace(row, flops=row.macs if row.kind == "Conv2d" else 0)


# By name, since this package must not import the networks. digits_net is a VGG.
RULES: dict[str, Callable[[_Tally], None]] = {
    "softprune.models.vgg.VGG": _count_vgg,
    "softprune.models.resnet_cifar.PreActResNet": _count_preact,
    "softprune.models.resnet_cifar.BottleneckResNet": _count_bottleneck,
    "softprune.models.densenet.DenseNet": _count_densenet,
    "softprune.models.resnet_cifar.OptionAResNet": _count_option_a,
}
