"""Plans as data: what is no plan is refused by name, and masks must fit."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from topologies import Chain, Depthwise, masks_of, randomise_

from softprune.cut import PrunePlan, apply_plan, make_plan
from softprune.cut.selection import read_graph
from softprune.errors import PlanError


@pytest.fixture(scope="module")
def text() -> str:
    model = randomise_(Chain())
    graph = read_graph(model, torch.randn(2, 3, 8, 8))
    return make_plan(graph, model, masks_of(model, {"bn1": [0, 3, 5], "bn2": [1, 2]})).to_json()


def _changed(text: str, *path: str, value: Any) -> str:
    """The document with one entry replaced and a checksum that fits."""
    document = json.loads(text)
    entry = document["plan"]
    for key in path[:-1]:
        entry = entry[key]
    if value is None:
        del entry[path[-1]]
    else:
        entry[path[-1]] = value
    body = json.dumps(document["plan"], separators=(",", ":"), sort_keys=True)
    document["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps(document)


def test_a_plan_is_read_back(text: str) -> None:
    plan = PrunePlan.from_json(text)
    assert plan.modules["conv2"].inputs == (0, 3, 5)
    assert plan.modules["conv2"].outputs == (1, 2)
    assert plan.sites == {"bn1": (0, 3, 5), "bn2": (1, 2)}
    assert PrunePlan.from_json(_changed(text, "macs", value=7)).macs == 7


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("modules", "conv1", "outputs"), [0, 0], "not increasing indices below 8"),
        (("modules", "conv1", "outputs"), [0, 8], "not increasing indices below 8"),
        (("modules", "conv1", "outputs"), [-1, 2], "not increasing indices below 8"),
        (("modules", "conv1", "outputs"), [], "keeps no output"),
        (("modules", "conv1", "kind"), "attention", "unknown kind 'attention'"),
        (("modules", "bn1", "select"), [4], "selects outside its input of width 0"),
        (("modules", "conv1", "groups"), "two", "malformed"),
        (("modules", "conv1", "inputs"), None, "malformed"),
        (("modules",), [], "malformed"),
        (("sites",), None, "malformed"),
    ],
)
def test_malformed_plans(text: str, path: tuple[str, ...], value: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        PrunePlan.from_json(_changed(text, *path, value=value))


def test_other_documents(text: str) -> None:
    with pytest.raises(PlanError, match="breaks at character"):
        PrunePlan.from_json(text[:-5])
    with pytest.raises(PlanError, match=r'"format" must be "softprune\.plan"\. Got list'):
        PrunePlan.from_json("[]")
    with pytest.raises(PlanError, match=r"reads plans of version 1\. Got version 2"):
        PrunePlan.from_json(text.replace('"version":1', '"version":2'))
    with pytest.raises(PlanError, match="does not match its checksum"):
        PrunePlan.from_json(text.replace('"macs":', '"macs":1'))


def test_masks_must_fit_the_sites() -> None:
    model = Chain()
    graph = read_graph(model, torch.randn(2, 3, 8, 8))
    with pytest.raises(PlanError, match="Got 'bn9'; its sites: bn1, bn2"):
        make_plan(graph, model, {"bn9": torch.ones(8, dtype=torch.bool)})
    with pytest.raises(PlanError, match=r"must have shape \(8,\). Got \(6,\)"):
        make_plan(graph, model, {"bn1": torch.ones(6, dtype=torch.bool)})
    plan = make_plan(graph, model, {"bn1": np.arange(8) < 3})  # type: ignore[dict-item]
    assert len(plan.modules["conv1"].outputs) == 3


def test_a_plan_from_data_starts_folded_biases_at_zero() -> None:
    """Constants are not stored: they are in the weights that are loaded next."""
    model = randomise_(Depthwise())
    graph = read_graph(model, torch.randn(2, 3, 8, 8))
    masks = masks_of(model, {"bn1": [0, 1, 2, 3], "bn2": [2, 3, 4, 5, 6, 7], "bn3": [0, 1]})
    plan = make_plan(graph, model, masks)
    assert plan.modules["pointwise"].folded
    folded: Any = apply_plan(plan, model).get_submodule("pointwise")
    assert folded.bias.abs().max() > 0
    empty: Any = apply_plan(PrunePlan.from_json(plan.to_json()), model).get_submodule("pointwise")
    assert empty.bias.shape == folded.bias.shape
    assert empty.bias.abs().max() == 0
