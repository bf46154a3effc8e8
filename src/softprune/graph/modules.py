"""Known BatchNorms and layers, and the modules that a cut may insert."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

TORCH_BATCH_NORMS: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TIMM_BATCH_NORMS = ("BatchNormAct2d", "SyncBatchNormAct")
"""Names of timm's BatchNorms with an activation, so that timm need not be installed."""


def is_known_batch_norm(cls: type) -> bool:
    """Return whether `cls` is a known BatchNorm class. Subclasses are not, since they may compute something else."""
    return cls in TORCH_BATCH_NORMS or is_timm_batch_norm(cls)


def is_known_norm(cls: type) -> bool:
    """Return whether `cls` is a known BatchNorm or InstanceNorm class, which normalises each channel separately."""
    return cls in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d) or is_known_batch_norm(cls)


def is_timm_batch_norm(cls: type) -> bool:
    """Return whether `cls` is one of timm's BatchNorms with an activation."""
    return cls.__name__ in TIMM_BATCH_NORMS and cls.__module__.split(".")[0] == "timm"


LAYERS = (nn.modules.conv._ConvNd, nn.Linear)
"""Modules whose `weight` and `bias` can be cut. The trial cut verifies subclasses."""
# fmt: off
PLAIN_LAYERS = frozenset([
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
])
# fmt: on
"""Modules with a known forward(), so that a bias can be added or the module can be replaced."""


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels-last memory format by number of dimensions."""


def layer_kind(module: nn.Module) -> str:
    """Return "linear", "conv_transpose" or "conv"."""
    if isinstance(module, nn.Linear):
        return "linear"
    return "conv_transpose" if isinstance(module, nn.modules.conv._ConvTransposeNd) else "conv"


def by_filter(layer: Any, tensor: Tensor) -> Tensor:
    """View the weight of `layer`, or its gradient, as (groups, filters per group, ...), one filter per output channel.

    Convolutions have a single group here, since the rows of their weight are the filters regardless of groups.
    """
    if layer_kind(layer) != "conv_transpose":
        return tensor.unsqueeze(0)
    return tensor.unflatten(0, (layer.groups, -1)).transpose(1, 2)


class Select(nn.Module):
    """Gathers channels by a constant index, for a module that reads a part of a shared tensor."""

    index: Tensor

    def __init__(self, index: Tensor, source_width: int) -> None:
        super().__init__()
        self.source_width = source_width
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return torch.index_select(x, 1, self.index)

    def extra_repr(self) -> str:
        return f"{len(self.index)} of {self.source_width}"


def select_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook that applies the child `select` to the input of `module`."""
    select: Any = module.select
    if args:
        return (select(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": select(kwargs["input"])}


class ConstantOutput(nn.Module):
    """Stands where a layer or a whole branch had nothing left to read: a constant per channel, in the shape that it
    would give, or with `broadcasts` in one that broadcasts to it."""

    value: Tensor

    def __init__(self, layer: nn.Module, value: Tensor, *, broadcasts: bool = False) -> None:
        super().__init__()
        self.broadcasts = broadcasts
        self.layer, self.is_linear = type(layer).__name__, isinstance(layer, nn.Linear)
        self.register_buffer("value", value)
        self.transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
        self.geometry: tuple[tuple[int, int, int, int], ...] = ()
        self.groups = 1
        if isinstance(layer, nn.modules.conv._ConvNd):
            self.geometry = tuple(_axis(layer, axis) for axis in range(len(layer.kernel_size)))
            # forward() may read them, for example to pad as TensorFlow does.
            for name in ("kernel_size", "stride", "padding", "dilation", "output_padding"):
                setattr(self, name, getattr(layer, name))
        elif not self.is_linear:
            _adopt_attributes_(self, layer)

    # Tools that fold a BatchNorm into the preceding layer read and set weight and bias.

    @property
    def weight(self) -> Tensor:
        """Return a weight for zero input channels, without elements."""
        channels = (0, len(self.value)) if self.transposed else (len(self.value), 0)
        return self.value.new_zeros(*channels, *getattr(self, "kernel_size", ()))

    @property
    def bias(self) -> Tensor:
        """Return the constant of each channel."""
        return self.value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias":
            name, value = "value", value.detach()
        if name != "weight":
            super().__setattr__(name, value)

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        if self.broadcasts:
            return self.value.view(1, -1, *(1,) * (input.ndim - 2))
        if self.is_linear:
            return self.value.expand(*input.shape[:-1], len(self.value)).clone()
        sizes = list(input.shape[2:])
        for axis, (reach, stride, pads, _) in enumerate(self.geometry):
            size = sizes[axis]
            forward, backward = (size + pads - reach - 1) // stride + 1, (size - 1) * stride - pads + reach + 1
            sizes[axis] = backward if self.transposed else forward
        if output_size is not None:
            sizes = list(output_size[-len(sizes) :])
        elif self.transposed:
            sizes = [size + extra for size, (_, _, _, extra) in zip(sizes, self.geometry, strict=True)]
        shape = (1, len(self.value), *(1,) * len(sizes))
        # Copy, since later modules may write in place, with the memory format of the input.
        last = CHANNELS_LAST.get(input.ndim)
        layout = last if last is not None and input.is_contiguous(memory_format=last) else torch.contiguous_format
        return self.value.view(shape).expand(input.shape[0], len(self.value), *sizes).clone(memory_format=layout)

    def extra_repr(self) -> str:
        return f"{len(self.value)} channels, in place of {self.layer}"


class Shortcut(nn.Module):
    """Replaces a residual block whose branch is constant: adds the constant to the input and applies the activation."""

    def __init__(self, block: nn.Module, value: Tensor, activation: str) -> None:
        super().__init__()
        self.constant, self.activation = ConstantOutput(block, value, broadcasts=True), activation
        _adopt_attributes_(self, block)

    def forward(self, input: Tensor) -> Tensor:
        total = input + self.constant(input)
        return torch.relu(total) if self.activation else total

    def extra_repr(self) -> str:
        return self.activation


def _adopt_attributes_(module: nn.Module, replaced: nn.Module) -> None:
    """Copy the plain attributes of a replaced branch to `module`, since other code may read them (ultralytics)."""
    for name, value in vars(replaced).items():
        if not (name.startswith("_") or callable(value) or hasattr(module, name)):
            setattr(module, name, value)


def _axis(layer: nn.modules.conv._ConvNd, axis: int) -> tuple[int, int, int, int]:
    """Return (dilated kernel size - 1, stride, padding on both sides, output padding) along an axis."""
    reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
    if isinstance(layer.padding, str):
        pads = reach if layer.padding == "same" else 0
    else:
        pads = 2 * int(layer.padding[axis])
    return reach, layer.stride[axis], pads, layer.output_padding[axis]
