"""masked == compact on 150 random networks under random masks. `make property` tries 1,000 others."""

import os

import pytest
import torch
from comparing import assert_exact, random_masks
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_networks import RandomNet, Spec, specs
from topologies import randomise_

from softprune.costs import cost
from softprune.graph.sites import KINDS
from softprune.plan import make_plan
from softprune.selection import read_graph
from softprune.surgery import apply_plan

ASKED = os.environ.get("SOFTPRUNE_EXAMPLES")
SHARDS = 10
EXAMPLES = int(ASKED or 150) // SHARDS
DEATHS = (0.0, 0.3, 0.7)
"""Chances of a whole site to die. `make property` tries them all on each network."""


def check(spec: Spec, number: int, kinds: set[str]) -> None:
    model = randomise_(RandomNet(spec), spec.seed)
    example = torch.randn(2, 3, 8, 8)
    graph = read_graph(model, example, kinds=kinds)
    assert not graph.unknown
    # A view that is the same for two channels and two groups may be taken for a literal; nothing else may fail.
    assert not [frozen for frozen in graph.frozen if "trial" in frozen.reason]
    for offset, deaths in enumerate(DEATHS) if ASKED else [(0, DEATHS[number % 3])]:
        masks = random_masks(graph, number + offset, deaths=deaths)
        plan = assert_exact(graph, model, masks)
        counted = cost(apply_plan(plan, model), example)
        assert (counted.macs, counted.params) == (plan.macs, plan.params)
    everything = make_plan(graph, model, {})
    assert (everything.macs, everything.params) == (everything.dense_macs, everything.dense_params)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))  # which the workers of `make test` share
def test_masked_equals_compact(shard: int) -> None:
    start = int.from_bytes(os.urandom(4)) if ASKED else 0
    kinds = st.sets(st.sampled_from(KINDS))
    run = given(spec=specs, number=st.integers(0, 2**16), kinds=kinds)(check)
    run = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.shrink or ASKED],
    )(run)
    seed(SHARDS * start + shard)(run)()
