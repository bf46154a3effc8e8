"""Save and restore modes and attributes of modules; find non-finite and uninitialised parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to eval mode within the block, and restore the mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore all attributes of all modules on exit: modes, parameters, children, hooks, and those set by forward()."""
    attributes = [module.__dict__ for module in model.modules()]
    # Parameters, buffers, children and hooks are stored in nested dictionaries.
    inner = [value for each in attributes for value in each.values() if isinstance(value, dict)]
    before = [(each, dict(each)) for each in (*attributes, *inner)]
    try:
        yield
    finally:
        for each, entries in before:
            each.clear()
            each.update(entries)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore all attributes of all modules and the values of all buffers on exit."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with attributes_kept(model):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def non_finite(model: nn.Module) -> list[str]:
    """Return the names of parameters and BatchNorm statistics that contain infinity or NaN.

    Other buffers may contain infinity on purpose, such as attention masks or the bounds of an observer.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            tensors.update(module.named_buffers(name, recurse=False))
    # Eight-bit floats have no sum.
    tensors = {
        name: tensor.detach() if tensor.itemsize > 1 else tensor.detach().float()
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    if not tensors:
        return []
    device = next(iter(tensors.values())).device
    # A sum is finite only if all of its terms are, and needs no boolean tensor. One transfer for all tensors, as each
    # one synchronises with the device.
    sums = torch.stack([tensor.sum().float().to(device) for tensor in tensors.values()]).isfinite().tolist()
    suspects = [name for name, finite in zip(tensors, sums, strict=True) if not finite]
    return [name for name in suspects if not tensors[name].isfinite().all()]


def first_uninitialised(model: nn.Module) -> tuple[str, str] | None:
    """Return (name, "lazy" or "meta") of the first uninitialised parameter, or None."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            return name, "lazy"
        if parameter.is_meta:
            return name, "meta"
    return None
