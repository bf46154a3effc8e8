"""Weight initialisation of the SCP authors, and the usual one of post-activation ResNets."""

import math

from torch import Tensor, nn

# Standard deviation of a standard normal distribution truncated to [-2, 2].
_TRUNCATED_STD = 0.87962566103423978


def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill `weight` from a normal distribution with deviation `std`, truncated at two standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def init_scp_(model: nn.Module) -> None:
    """Initialise `model` like the SCP authors.

    Convolutions and linear layers: truncated normal with standard deviation sqrt(2 / fan_in) after the truncation, bias
    0. BatchNorms keep PyTorch's default, scale 1 and shift 0.
    """
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            fan_in = module.weight[0].numel()
            truncated_normal_(module.weight, math.sqrt(2 / fan_in) / _TRUNCATED_STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def init_post_activation_(model: nn.Module) -> None:
    """Initialise a post-activation ResNet in the usual way.

    Convolutions: normal with standard deviation sqrt(2 / (k * k * out_channels)). Linear layers: normal with
    sqrt(2 / in_features), bias 0. BatchNorms keep PyTorch's default, scale 1 and shift 0.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            nn.init.zeros_(module.bias)
