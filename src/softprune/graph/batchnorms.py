"""The BatchNorm classes that softprune knows, so that a subclass that computes something else is left alone."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

TORCH_BATCH_NORMS: tuple[type[_BatchNorm], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)
TIMM_BATCH_NORMS = ("BatchNormAct2d", "SyncBatchNormAct")
"""timm's BatchNorms with the activation inside, known by name so that timm need not be installed."""


def is_known_batch_norm(cls: type) -> bool:
    """Whether `cls` is a plain BatchNorm of a known class; subclasses may compute something else."""
    return cls in TORCH_BATCH_NORMS or is_timm_batch_norm(cls)


def is_timm_batch_norm(cls: type) -> bool:
    """Whether `cls` is one of timm's BatchNorms with an activation."""
    return cls.__name__ in TIMM_BATCH_NORMS and cls.__module__.split(".")[0] == "timm"
