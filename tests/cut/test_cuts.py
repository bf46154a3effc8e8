"""What one module may keep: cuts that no plan has are refused by the name of the module."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from softprune.cut.cuts import ModuleCut, check_cuts, is_of_kind
from softprune.graph.modules import Select

SOME = (0, 1, 4, 5)
CUTS = {
    "conv": ModuleCut(kind="conv", width_in=8, width_out=8, inputs=SOME, outputs=SOME, groups=2),
    "fc": ModuleCut(kind="linear", width_in=8, width_out=4, inputs=SOME, outputs=(0, 1, 2, 3)),
    "bn": ModuleCut(kind="norm", width_in=8, width_out=8, inputs=SOME, outputs=SOME),
    "select": ModuleCut(
        kind="select", width_in=6, width_out=8, inputs=(0, 1, 2), outputs=SOME, select=(0, 1, 2, 0), source_width=3
    ),
    "source": ModuleCut(kind="source", width_in=8, width_out=8, inputs=SOME, outputs=SOME),
}
SHAPES = {
    "conv.weight": (8, 2, 3, 3),  # four groups
    "fc.weight": (4, 8),
    "bn.running_mean": (8,),  # no affine
    "bn.running_var": (8,),
    "bn.num_batches_tracked": (),
    "select.index": (8,),
    "source.value": (8,),
}


def test_cuts_that_fit_are_taken() -> None:
    check_cuts(SHAPES, {}, CUTS, {}, {})


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("conv", {"outputs": (0, 1, 6, 7)}, "does not fit its dense shapes"),  # of other groups than the inputs
        ("conv", {"inputs": (0, 1, 2, 4, 5, 6), "groups": 2}, "does not fit its dense shapes"),  # three groups of them
        ("conv", {"inputs": (0, 4, 5, 6), "outputs": (0, 1, 4, 5, 6, 7), "groups": 2}, "does not fit its dense shapes"),
        ("conv", {"inputs": (0, 1), "groups": 1}, "does not fit its dense shapes"),
        ("conv", {"width_in": 9}, "does not fit its dense shapes"),
        ("fc", {"inputs": (), "outputs": (), "void": True}, "keeps no output"),
        ("fc", {"groups": 2}, "does not fit its dense shapes"),
        ("bn", {"zeroed": (0,)}, "does not fit its dense shapes"),  # nothing to set to zero
        ("bn", {"folded": True}, "only convolutions and linear layers"),
        ("select", {"void": True}, "only convolutions and linear layers"),
        ("select", {"select": ()}, "selects outside its input of width 3"),
        ("source", {"inputs": (0, 1, 4, 6)}, "inputs and outputs must be the same"),
        ("source", {"select": (0, 1, 2, 3), "source_width": 8}, "does not fit its dense shapes"),
    ],
)
def test_cuts_that_no_plan_has_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_cuts(SHAPES, {}, {**CUTS, name: replace(CUTS[name], **changes)}, {}, {})


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((9, 2, 3, 3), {"width_out": 9, "outputs": (0, 1, 5, 6)}),
        ((8, 3, 3, 3), {}),
        ((8, 4, 3, 3), {"inputs": (0, 1, 2, 4)}),  # three inputs of one group, and one of the other
    ],
)
def test_groups_that_do_not_divide_a_weight_are_refused(shape: tuple[int, ...], changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not fit its dense shapes"):
        check_cuts({"conv.weight": shape}, {}, {"conv": replace(CUTS["conv"], **changes)}, {}, {})


def test_whatever_a_cut_does_changes_its_module() -> None:
    whole = ModuleCut(kind="conv", width_in=2, width_out=2, inputs=(0, 1), outputs=(0, 1))
    assert not whole.changes
    for change in ({"inputs": (0,)}, {"select": (0, 1)}, {"void": True}, {"folded": True}, {"zeroed": (1,)}):
        assert replace(whole, **change).changes  # type: ignore[arg-type]


def test_modules_are_known_by_their_kind() -> None:
    index = torch.tensor([0, 1, 2, 0])
    assert is_of_kind(Select(index, 6), CUTS["select"])
    assert not is_of_kind(Select(index, 5), CUTS["select"])
    assert not is_of_kind(nn.ConvTranspose2d(8, 8, 3), CUTS["conv"])
    assert not is_of_kind(nn.Linear(8, 8), CUTS["conv"])
