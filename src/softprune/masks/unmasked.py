"""Refuse a network whose pruner is still at work, where only the network itself will do."""

from torch import nn

from softprune.errors import ModelError
from softprune.masks.batchnorm import is_masked


def check_unmasked(model: nn.Module, purpose: str, *, name: str = "model") -> None:
    """Raise a ModelError if `model`, which the caller calls `name`, has masks: `purpose` needs one without."""
    masked = [path for path, module in model.named_modules() if is_masked(module)]
    if masked:
        raise ModelError(
            f"{purpose} needs a network without masks. Got `{name}` with masks on {len(masked)} of its BatchNorms "
            f"('{masked[0]}' is the first), from a pruner that is still at work on it; call pruner.detach() first, or "
            "pass what pruner.compact() returned."
        )
