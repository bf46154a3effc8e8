"""masked == compact on 60 random networks under random masks. `make property` tries 1,000 others, and targets."""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_networks import Spec, assert_sound, specs

from softprune.graph.channels import KINDS

SHARDS = 10
EXAMPLES = 6
DEATHS = (0.0, 0.3, 0.7)
"""Chances of a whole site to die."""


def check(spec: Spec, number: int, kinds: set[str]) -> None:
    assert_sound(spec, number, kinds, deaths=(DEATHS[number % 3],))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))  # which the workers of `make test` share
def test_masked_equals_compact(shard: int) -> None:
    kinds = st.sets(st.sampled_from(KINDS))
    run = given(spec=specs, number=st.integers(0, 2**16), kinds=kinds)(check)
    run = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.shrink],
    )(run)
    seed(shard)(run)()
