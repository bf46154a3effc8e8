"""The order of the images."""

import pytest
import torch

from softprune.data.batches import EpochSampler
from softprune.errors import ConfigError


def test_the_authors_epoch_has_782_full_batches():
    sampler = EpochSampler(size=50_000, batch_size=64)
    assert sampler.steps == 782
    indices = sampler.indices(0)
    assert indices.shape == (782, 64)
    assert len(indices.flatten().unique()) == 50_000
    # The second epoch goes on where the first one stopped, 48 images into the second permutation.
    assert torch.equal(sampler.indices(1).flatten()[: 50_000 - 48], sampler.permutation(1)[48:])


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (10, 5), (3, 8), (7, 1)])
def test_epochs_are_cut_from_an_endless_row_of_permutations(size, batch):
    sampler = EpochSampler(size=size, batch_size=batch, seed=3)
    row = torch.cat([sampler.indices(epoch).flatten() for epoch in range(12)])
    whole = len(row) // size
    for number, part in enumerate(row[: whole * size].view(whole, size)):
        assert torch.equal(part, sampler.permutation(number))
        assert torch.equal(part.sort().values, torch.arange(size))


def test_depends_on_seed_and_epoch_alone():
    one = EpochSampler(size=100, batch_size=10, seed=1)
    first = one.indices(3)
    torch.rand(5)
    assert torch.equal(first, EpochSampler(size=100, batch_size=10, seed=1).indices(3))
    assert not torch.equal(first, one.indices(4))
    assert not torch.equal(first, EpochSampler(size=100, batch_size=10, seed=2).indices(3))


def test_permutations_look_random():
    sampler = EpochSampler(size=1000, batch_size=10)
    permutation = sampler.permutation(0)
    ascents = (permutation[1:] > permutation[:-1]).sum()
    assert 440 < ascents < 560
    overlap = (permutation == sampler.permutation(1)).sum()
    assert overlap < 8


def test_processes_share_every_batch():
    whole = EpochSampler(size=50, batch_size=12)
    parts = [EpochSampler(size=50, batch_size=12, rank=rank, world_size=3) for rank in range(3)]
    assert torch.equal(torch.cat([part.indices(2) for part in parts], dim=1), whole.indices(2))
    assert torch.equal(torch.cat([part.draws(2) for part in parts], dim=1), whole.draws(2))


def test_every_draw_has_its_own_number():
    sampler = EpochSampler(size=10, batch_size=4)
    numbers = torch.cat([sampler.draws(epoch).flatten() for epoch in range(3)])
    assert torch.equal(numbers, torch.arange(36))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0, "batch_size": 4}, "at least one image"),
        ({"size": 5, "batch_size": 0}, "at least one image"),
        ({"size": 5, "batch_size": 4, "world_size": 3}, "divide evenly"),
        ({"size": 5, "batch_size": 4, "rank": 2, "world_size": 2}, "rank must lie in 0 to 1"),
    ],
)
def test_impossible_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        EpochSampler(**options)
