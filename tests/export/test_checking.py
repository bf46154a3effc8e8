"""The check of exports sees what it must."""

import pytest
import torch
from torch import Tensor

from softprune.errors import VerificationError
from softprune.export.checking import compare_outputs
from softprune.graph import Example

LOGITS = torch.randn(2, 5, dtype=torch.double)
INFINITE = LOGITS.masked_fill(torch.arange(5) > 3, float("-inf"))


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ([INFINITE], [INFINITE + 0.1]),
        ([INFINITE], [LOGITS]),
        ([LOGITS], [INFINITE]),
        ([1e4 * LOGITS, LOGITS], [1e4 * LOGITS, 0 * LOGITS]),
        ([LOGITS, LOGITS], [LOGITS]),
        ([LOGITS], [LOGITS.float() + 1e-5]),
    ],
)
def test_differences_are_seen(expected: list[Tensor], got: list[Tensor]) -> None:
    network = torch.nn.Module()
    network.forward = lambda x: expected  # type: ignore[method-assign, assignment]
    example = [Example.of(torch.zeros(2, 1))]
    compare_outputs(network, lambda attempt: expected, example, what="a copy")
    with pytest.raises(VerificationError, match="must compute"):
        compare_outputs(network, lambda attempt: got, example, what="another one")
