"""Mixup and CutMix."""

import torch

from softprune.lab.data.augment import Mixing, mixed


def test_draws_are_a_function_of_seed_and_step():
    mixing = Mixing(mixup=0.4, cutmix=1.0)
    draws = mixing.draws(3, range(100), (32, 16))
    assert draws.shape == (100, 6)
    assert torch.equal(draws[40:60], mixing.draws(3, range(40, 60), (32, 16)))
    assert not torch.equal(draws, mixing.draws(4, range(100), (32, 16)))
    cut = draws[:, 0] == 1
    assert 20 < int(cut.sum()) < 80
    assert torch.equal(draws[~cut, 0], draws[~cut, 5])
    area = (draws[:, 2] - draws[:, 1]) * (draws[:, 4] - draws[:, 3])
    torch.testing.assert_close(draws[cut, 5], 1 - area[cut] / 512)
    assert (draws[:, 2] <= 32).all()
    assert (draws[:, 4] <= 16).all()
    assert not Mixing()


def test_mixup_adds_and_cutmix_pastes():
    images = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 4, 6)
    up = mixed(images, torch.tensor([0.75, 0, 0, 0, 0, 0.75]))
    torch.testing.assert_close(up[:, 0, 0, 0], torch.tensor([0.5, 0.75, 1.75]))
    cut = mixed(images, torch.tensor([1.0, 1, 3, 2, 5, 0.75]))
    assert cut[1, 0].tolist() == [[1] * 6, [1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 1], [1] * 6]
    assert cut[0, 0, 1].tolist() == [0, 0, 2, 2, 2, 0]
