"""Weights that training has driven out of bounds, or that have no values yet."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def not_finite(model: nn.Module) -> list[str]:
    """Names of the parameters and BatchNorm statistics that hold infinity or NaN.

    Other buffers are left alone: a mask of minus infinities, or the bounds of an observer, are meant.
    """
    tensors = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            tensors.update(module.named_buffers(name, recurse=False))  # type: ignore[arg-type]
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not tensors:
        return []
    device = next(iter(tensors.values())).device
    # One answer for all of them: each would wait for the device.
    flags = torch.stack([torch.isfinite(tensor).all().to(device) for tensor in tensors.values()]).tolist()
    return [name for name, finite in zip(tensors, flags, strict=True) if not finite]


def without_values(model: nn.Module) -> tuple[str, str] | None:
    """Name and kind of the first parameter that has none: "lazy" or "meta"; None if all have."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            return name, "lazy"
        if parameter.is_meta:
            return name, "meta"
    return None
