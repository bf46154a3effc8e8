"""The control: by lot, the same for a seed, in the asked number."""

import pytest
from method_networks import Chain, batch

from softprune.methods import RandomPruner


@pytest.mark.parametrize(("ratio", "kept"), [(0.5, [4, 6]), (0.0, [8, 12]), (0.99, [1, 1])])
def test_the_asked_share_of_every_site_goes(ratio: float, kept: list[int]) -> None:
    pruner = RandomPruner(Chain(), batch()[0], ratio=ratio)
    assert [site.kept for site in pruner.summary().sites] == kept


def test_the_lot_depends_on_the_seed_alone() -> None:
    def drawn(seed: int) -> list[list[bool]]:
        pruner = RandomPruner(Chain(64, 64), batch()[0], ratio=0.5, seed=seed)
        return [mask.tolist() for mask in pruner.decide().values()]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    first, second = drawn(0)
    assert first != second
