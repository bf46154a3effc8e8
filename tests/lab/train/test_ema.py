"""The moving average of the weights."""

import torch
from torch import nn

from softprune.lab.train.optim import WeightAverage


def test_the_average_follows_its_definition_and_swaps_in() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(0.0)
    average = WeightAverage(model, decay=0.5)
    expected = 0.0
    for step in range(1, 8):
        with torch.no_grad():
            weight.fill_(float(step))
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    with average.applied():
        torch.testing.assert_close(weight.item(), expected)
    assert weight.item() == 7.0

    other = WeightAverage(model, decay=0.5)
    other.load_state_dict(average.state_dict())
    assert other.state_dict()["updates"] == 7
    with other.applied():
        torch.testing.assert_close(weight.item(), expected)
