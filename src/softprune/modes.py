"""Train and eval mode for a while: afterwards every module has its own mode again, also one that was frozen."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Whatever becomes of the modes inside, they are as they were afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode."""
    with modes_kept(model):
        model.eval()
        yield
