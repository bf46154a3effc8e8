"""The operator of fused networks."""

import pytest
import torch
import torch.nn.functional as F

from softprune.fused.inference import convolutions
from softprune.fused.inference.convolutions import conv2d_relu


@pytest.mark.parametrize("other", [False, True])
def test_the_operator_is_sound(other: bool) -> None:
    torch.manual_seed(0)
    image, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8)
    added = torch.randn(2, 8, 3, 3) if other else None
    values = (image, weight, bias, added, [2, 2], [1, 1], [1, 1], 1)
    torch.library.opcheck(conv2d_relu, values)
    want = F.conv2d(image, weight, bias, 2, 1)
    torch.testing.assert_close(conv2d_relu(*values), F.relu(want if added is None else want + added))


@pytest.mark.parametrize("other", [False, True])
def test_no_kernel_is_asked_for_an_empty_batch(other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "has_kernel", lambda device, dtype: True)
    image, weight = torch.randn(0, 4, 6, 6), torch.randn(8, 4, 3, 3)
    added = torch.randn(0, 8, 3, 3) if other else None
    assert conv2d_relu(image, weight, None, added, [2, 2], [1, 1], [1, 1], 1).shape == (0, 8, 3, 3)
