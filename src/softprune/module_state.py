"""The state of a module beyond its values: train and eval mode, non-finite and uninitialised parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode; restore the mode of every module on exit."""
    with modes_kept(model):
        model.eval()
        yield


def non_finite(model: nn.Module) -> list[str]:
    """Return the names of parameters and BatchNorm statistics that hold infinity or NaN.

    Other buffers may hold infinity on purpose, such as attention masks or the bounds of an observer.
    """
    tensors = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            tensors.update(module.named_buffers(name, recurse=False))  # type: ignore[arg-type]
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not tensors:
        return []
    device = next(iter(tensors.values())).device
    # One transfer for all tensors: each would synchronise with the device.
    flags = torch.stack([torch.isfinite(tensor).all().to(device) for tensor in tensors.values()]).tolist()
    return [name for name, finite in zip(tensors, flags, strict=True) if not finite]


def first_uninitialised(model: nn.Module) -> tuple[str, str] | None:
    """Return name and kind ("lazy" or "meta") of the first uninitialised parameter, or None."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            return name, "lazy"
        if parameter.is_meta:
            return name, "meta"
    return None
