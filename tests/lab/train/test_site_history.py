"""Sites keep their dense widths through cuts."""

import torch
from topologies import GROUPED

from softprune import SoftPruner, models
from softprune.cut import plans_of
from softprune.lab.train.history import SiteHistory


def _kill(model: torch.nn.Module, name: str, channels: list[int]) -> None:
    bn = model.get_submodule(name)
    with torch.no_grad():
        bn.bias[channels] = -9.0


def test_two_cuts_are_told_in_terms_of_the_dense_network() -> None:
    torch.manual_seed(0)
    example = torch.zeros(2, 1, 8, 8)
    model = models.build("digits_net", 10)
    pruner = SoftPruner(model, example)
    first, second = pruner.sites[0].name, pruner.sites[1].name
    sites = SiteHistory.of(pruner)
    _kill(model, first, [0, 3])
    sites.note(model)
    compact = pruner.compact()
    sites.cut(plans_of(compact)[-1])

    again = SoftPruner(compact, example)
    _kill(compact, first, [1])  # the dense network's channel 2, since 0 is gone
    with torch.no_grad():
        compact.get_submodule(first).weight[0] = 0.25  # channel 1
    sites.note(compact)
    restored = SiteHistory(sites.model_dump())
    for told in (sites, restored):
        masks = told.dense_masks(again.masks())
        assert masks[first].logical_not().nonzero().flatten().tolist() == [0, 2, 3]
        assert bool(masks[second].all())
        record = told.records(again.masks())[0]
        assert (record.width, record.kept) == (32, 29)
        assert record.beta[0] == record.beta[3] == -9.0
        assert record.gamma[1] == 0.25


def test_a_stream_is_shown_with_what_enters_it_before_and_after_a_cut() -> None:
    topology = GROUPED["zero channels around a stream"]
    model = topology.build()
    pruner = SoftPruner(model, topology.example(), site_kinds=topology.kinds)
    _kill(model, "bn", [0])
    _kill(model, "bn2", [0])
    for name in ("bn4", "bn6"):
        _kill(model, name, [2, 3])  # channels 0 and 1 of the first stage enter here
    sites = SiteHistory(SiteHistory.of(pruner).model_dump())
    sites.note(model)
    masks = pruner.masks()
    compact = pruner.compact()
    sites.cut(plans_of(compact)[-1])
    sites.note(compact)
    records = {record.name: record for record in sites.records({})}
    assert records["bn"].keep == (False, True, True, True) == tuple(masks["bn"].tolist())
    assert records["bn4"].keep == (True, True, False, *[True] * 5) == tuple(masks["bn4"].tolist())
    assert records["bn4"].beta == (0, 0, -9, *[0] * 5)  # channel 3 is alive by what enters
