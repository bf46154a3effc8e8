"""A plan that was changed and signed anew: what cannot be right is refused by name, before anything is cut."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from saved_files import document_of, rewrite
from topologies import TOPOLOGIES, masks_of, randomise_
from torch import Tensor, nn

import softprune as sp
from softprune.cut import PrunePlan, apply_plan, make_plan, read_plans
from softprune.errors import FileFormatError, ModelError, PlanError
from softprune.graph import trace


def compact_of(name: str) -> tuple[nn.Module, nn.Module]:
    """A network of the table, and what its hand-derived masks leave of it."""
    topology = TOPOLOGIES[name]
    model = randomise_(topology.build())
    graph = trace(model, topology.example())
    return model, apply_plan(make_plan(graph, model, masks_of(model, topology.hand.kept)), model)


def change(file: Path, path: tuple[str, ...], value: Any) -> None:
    """Set one entry of the stored plan, and sign the plan and the file again."""

    def edit(document: dict[str, Any]) -> None:
        plan = document["plans"][0]
        entry = plan["plan"]
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = value
        body = json.dumps(plan["plan"], separators=(",", ":"), sort_keys=True)
        plan["sha256"] = hashlib.sha256(body.encode()).hexdigest()

    rewrite(file, edit)


CUT = {
    "kind": "conv", "width_in": 3, "width_out": 8, "inputs": [0, 1, 2], "outputs": [0], "groups": 1, "select": None,
    "source_width": 0, "void": False, "folded": False, "zeroed": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "path", "value", "says"),
    [
        ("chain", ("modules", "zzz"), CUT, "'zzz' is cut as 'conv'.*no such module"),
        ("chain", ("aliases", "zzz"), "conv1", "'zzz' is cut as 'conv'.*no such module"),
        ("chain", ("aliases", "conv2"), "conv1", "'conv2' must be an alias"),
        ("tied", ("aliases", "far"), "zzz", "'far' must be an alias of a module in the plan, got 'zzz'"),
        ("chain", ("modules", "bn1", "zeroed"), [99], "zeroed outputs that are not increasing indices"),
        ("chain", ("modules", "bn1", "zeroed"), [-1], "zeroed outputs that are not increasing indices"),
        ("chain", ("modules", "conv1", "zeroed"), [0], "which only BatchNorms have"),
        ("chain", ("modules", "conv1", "width_out"), 80, "'conv1' is cut as 'conv' from 3 inputs and 80 outputs"),
        ("chain", ("modules", "fc", "width_in"), 600, "'fc' is cut as 'linear' from 600 inputs"),
        ("chain", ("modules", "bn1", "width_out"), 80, "'bn1' is cut as 'norm' from 8 inputs and 80 outputs"),
        ("chain", ("modules", "conv1", "groups"), 0, "0 groups, which must be at least 1"),
        ("chain", ("modules", "conv1", "groups"), 7, "7 groups, which must .* divide"),
        ("chain", ("modules", "conv1", "groups"), 3, "3 groups"),
        ("grouped", ("modules", "grouped", "groups"), 1, "'grouped' is cut as 'conv' .* to 1 groups"),
        ("chain", ("modules", "conv1", "groups"), 1.9, r"groups' must be a valid integer, got 1\.9"),
        ("chain", ("modules", "conv1", "groups"), True, "groups' must be a valid integer, got True"),
        ("chain", ("modules", "conv1", "outputs"), [0.0, 1], r"outputs.0' must be a valid integer, got 0\.0"),
        ("chain", ("modules", "conv1", "outputs"), "01", "outputs' must be a valid array, got '01'"),
        ("chain", ("modules", "conv1", "inputs"), [], "keeps no input"),
        ("chain", ("modules", "conv1", "void"), 1, "void' must be a valid boolean, got 1"),
        ("chain", ("modules", "bn1", "void"), True, "only convolutions and linear layers"),
        ("chain", ("modules", "bn1", "inputs"), [0], "inputs and outputs must be the same"),
        ("chain", ("modules", "conv1", "kind"), "linear", "'conv1' is cut as 'linear'.*does not fit"),
        ("chain", ("modules", "fc", "kind"), "conv", "'fc' is cut as 'conv'.*does not fit"),
        ("chain", ("modules", "fc", "kind"), "norm", "inputs and outputs must be the same"),
        ("chain", ("modules", "fc", "kind"), "select", "selects nothing"),
        ("chain", ("modules", "fc", "select"), [0], "'fc' selects outside its input of width 0"),
        ("chain", ("macs",), -5, "'macs' must be greater than or equal to 0, got -5"),
        ("chain", ("params",), "5", "'params' must be a valid integer, got '5'"),
        ("chain", ("dense_params",), 5.5, r"'dense_params' must be a valid integer, got 5\.5"),
        ("chain", ("sites", "bn1"), [1000], "the site 'bn1' keeps channels that are not increasing indices below 8"),
        ("chain", ("sites", "zzz"), [0], "the site 'zzz' is no BatchNorm in the plan"),
        ("chain", ("sites", "conv1"), [0], "the site 'conv1' is no BatchNorm in the plan"),
        ("chain", ("model",), 5, "'model' must be a valid string, got 5"),
        ("chain", ("floored",), [5], "'floored.0' must be a valid string, got 5"),
        ("layer scale", ("parameters", "scale", "kept"), [99], "'scale' keeps what is not increasing indices below 8"),
        ("layer scale", ("parameters", "scale", "kept"), [], "'scale' keeps what is not increasing indices below 8"),
        ("layer scale", ("parameters", "scale", "dim"), 7, "'scale' is cut along dimension 7"),
        ("layer scale", ("parameters", "scale", "width"), 9, "dimension 0 of width 9"),
        ("chain", ("parameters", "zzz"), {"dim": 0, "width": 1, "kept": [0]}, "that there is none"),
        ("chain", ("parameters", "fc.bias"), {"dim": 0, "width": 5, "kept": [0]}, "is cut twice"),
        ("chain", ("parameters", "bn1.running_var"), {"dim": 0, "width": 8, "kept": [0]}, "is cut twice"),
        ("tied", ("parameters", "far.weight"), {"dim": 0, "width": 6, "kept": [0]}, "is cut twice"),
        ("chain", ("modules", "bn1", "zeroed"), [7], "zeroed outputs that are not increasing indices"),
    ],
)  # fmt: skip
def test_plans_that_were_signed_anew_are_refused(
    tmp_path: Path, name: str, path: tuple[str, ...], value: Any, says: str
) -> None:
    model, small = compact_of(name)
    sp.save(small, tmp_path / "net")
    change(tmp_path / "net.safetensors", path, value)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match=says):
        sp.load(tmp_path / "net", model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_select_must_have_as_many_channels_as_its_reader(tmp_path: Path) -> None:
    model, small = compact_of("pre-activation")
    sp.save(small, tmp_path / "net")
    plans = document_of(tmp_path / "net.safetensors")["plans"]
    name, cut = next((name, cut) for name, cut in plans[0]["plan"]["modules"].items() if cut["select"])
    change(tmp_path / "net.safetensors", ("modules", name, "select"), [*cut["select"], 0])
    with pytest.raises(PlanError, match="but keeps"):
        sp.load(tmp_path / "net", model)
    change(tmp_path / "net.safetensors", ("modules", name, "select"), cut["select"])
    change(tmp_path / "net.safetensors", ("modules", name, "source_width"), 10**15)
    with pytest.raises(PlanError, match="but keeps"):
        sp.load(tmp_path / "net", model)


def test_a_module_of_another_class_is_refused(tmp_path: Path) -> None:
    """A square convolution and its transposed one have the same shapes."""
    model, small = compact_of("tied")
    sp.save(small, tmp_path / "net")
    far: Any = model.get_submodule("far")
    model.far = nn.ConvTranspose2d(6, 6, 3, bias=False)
    model.far.weight = far.weight
    with pytest.raises(PlanError, match=r"cuts 'far' as a module of kind 'conv'\. Got a ConvTranspose2d"):
        sp.load(tmp_path / "net", model)


def test_one_module_under_two_names_is_cut_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Conv2d(3, 6, 3)
            self.bn, self.last = nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.bn(self.first(x))))

    model = Twice()
    graph = trace(model, torch.randn(2, 3, 8, 8))
    plan = make_plan(graph, model, {"bn": torch.arange(6) < 4})
    assert apply_plan(plan, model).get_submodule("second").out_channels == 4
    plan.modules["second"] = plan.modules["first"]
    with pytest.raises(PlanError, match="Got 'first' and 'second', which are one module"):
        apply_plan(plan, model)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"plans":' * 100_000, "1" * 10_000])
def test_json_that_python_cannot_read(tmp_path: Path, text: str) -> None:
    model, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net")
    content = safetensors.torch.save({}, metadata={"softprune": text})
    file.write_bytes(content)
    with pytest.raises(FileFormatError):
        sp.load(file, model)
    with pytest.raises(FileFormatError, match="must be JSON"):
        read_plans(file)
    with pytest.raises(PlanError, match="a plan must be JSON"):
        PrunePlan.from_json(text)


def test_nesting_inside_a_plan_is_refused(tmp_path: Path) -> None:
    _, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net")
    document = document_of(file)
    document["plans"][0]["plan"]["macs"] = "DEEP"
    text = json.dumps(document)
    for depth in range(700, 1001, 5):  # somewhere here reading, writing and showing it give up, one by one
        deep = text.replace('"DEEP"', "[" * depth + "]" * depth)
        file.write_bytes(safetensors.torch.save({}, metadata={"softprune": deep}))
        with pytest.raises((PlanError, FileFormatError)):
            read_plans(file)


@pytest.mark.parametrize("path", [("macs",), ("modules", "conv1", "width_out"), ("dense", "fc.bias")])
def test_numbers_beyond_any_network_are_refused(path: tuple[str, ...], tmp_path: Path) -> None:
    model, small = compact_of("chain")
    file = sp.save(small, tmp_path / "net")
    for number in (10**4000, 2**63):
        change(file, path, [number] if path[0] == "dense" else number)
        with pytest.raises(PlanError, match="must be less than"):
            sp.load(file, model)


# --- what cannot be stored, or loaded onto ---------------------------------------------------------------------------


class _Noting(nn.Conv2d):
    """A convolution that stores something of its own."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__(inputs, outputs, size)
        self.note: Any = {"scale": 3}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def _noting() -> nn.Module:
    return randomise_(nn.Sequential(_Noting(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)))


def test_extra_state_that_is_no_tensor_is_not_saved(tmp_path: Path) -> None:
    model = _noting()
    graph = trace(model, torch.randn(2, 3, 8, 8))
    small = apply_plan(make_plan(graph, model, {"1": torch.arange(8) < 3}), model)
    with pytest.raises(ModelError, match=r"Got a dict as '0\._extra_state' from '0' \(_Noting\)"):
        sp.save(small, tmp_path / "deep" / "net")
    assert not list(tmp_path.iterdir())
    small[0].note = torch.tensor(3.0)  # type: ignore[index]
    model[0].note = torch.tensor(0.0)  # type: ignore[index]
    sp.save(small, tmp_path / "net")
    assert sp.load(tmp_path / "net", model)[0].note == 3  # type: ignore[index]
    with pytest.raises(ModelError, match="Got a dict"):
        sp.load(tmp_path / "net", _noting())


def test_meta_models_are_refused(tmp_path: Path) -> None:
    _, small = compact_of("chain")
    sp.save(small, tmp_path / "net")
    with torch.device("meta"):
        empty = TOPOLOGIES["chain"].build()
    with pytest.raises(ModelError, match=r"'conv1\.weight' on the meta device.*to_empty\(device=\.\.\.\)"):
        sp.load(tmp_path / "net", empty)
    loaded = sp.load(tmp_path / "net", empty.to_empty(device="cpu"))
    example = TOPOLOGIES["chain"].example()
    with torch.no_grad():
        assert torch.equal(loaded(example), small.eval()(example))
    with pytest.raises(ModelError, match="on the meta device, which has no data"):
        sp.save(small.to("meta"), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]
