"""The operator of fused networks: a convolution, plus its bias, plus another tensor, then ReLU."""

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
"""cuDNN has such kernels for tensor cores; for full precision it falls back on slow ones."""


@torch.library.custom_op("softprune::conv2d_relu", mutates_args=())
def conv2d_relu(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """relu(conv2d(image, weight, bias) + other): one kernel in half precision on an NVIDIA GPU, three elsewhere."""
    if image.numel() == 0 or not has_kernel(
        image.device, image.dtype
    ):  # a kernel may not take an empty batch
        result = F.conv2d(image, weight, bias, stride, padding, dilation, groups)
        return F.relu(result if other is None else result + other)
    steps = (stride, padding, dilation, groups)
    if other is None:
        found: Tensor = torch.ops.aten.cudnn_convolution_relu(image, weight, bias, *steps)
    else:
        found = torch.ops.aten.cudnn_convolution_add_relu(image, weight, other, 1.0, bias, *steps)
    return found


@conv2d_relu.register_fake
def _(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return F.conv2d(image, weight, bias, stride, padding, dilation, groups)


CONV_RELU = torch.ops.softprune.conv2d_relu.default
"""The same, as graphs name it."""


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the operator is one kernel there."""
    return device.type == "cuda" and torch.version.hip is None and dtype in HALF
