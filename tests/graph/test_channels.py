"""Classes of channels."""

import numpy as np
import pytest

from softprune.graph.channels import ChannelSets


@pytest.mark.parametrize("reverse", [False, True])
def test_chains_become_one_class(reverse: bool) -> None:
    sets = ChannelSets()
    atoms = sets.fresh(50)
    order = slice(None, None, -1) if reverse else slice(None)
    sets.union(atoms[:-1][order], atoms[1:][order])
    assert set(sets.find(atoms).tolist()) == {int(atoms[0])}


def test_one_channel_joins_all_that_it_meets() -> None:
    sets = ChannelSets()
    several, one = sets.fresh(50), sets.fresh(1)
    sets.union(several, one)
    assert len(set(sets.classes()[np.concatenate([several, one])].tolist())) == 1


def test_pairs_stay_apart() -> None:
    sets = ChannelSets()
    left, right = sets.fresh(4), sets.fresh(4)
    sets.union(left, right)
    assert sets.find(right).tolist() == left.tolist()
    sets.union(right[:2], left[2:])
    assert sets.find(right).tolist() == [left[0], left[1]] * 2


def test_a_pinned_class_stays_pinned_when_it_joins_another() -> None:
    sets = ChannelSets()
    left, right, other = sets.fresh(2), sets.fresh(2), sets.fresh(2)
    sets.pin(right[1:], "it is an output")
    sets.union(left, right)
    assert sets.pinned_because(left[1:]) == "it is an output"
    assert sets.pinned_because(left) is None
    sets.union(other, left[1:])
    assert sets.pinned_because(other) == "it is an output"


def test_every_channel_of_a_chain_with_a_pinned_one_is_pinned() -> None:
    sets = ChannelSets()
    atoms = sets.fresh(3)
    sets.pin(atoms[2:], "it is an output")
    sets.union(atoms[1:], atoms[:-1])
    assert sets.pinned_because(atoms) == "it is an output"
