"""Targets through recipes and the trainer: met, resumed bit for bit, never fought by a schedule of the strength."""

import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tiny import StopAt

from softprune.bench import Runtime
from softprune.budget.latency import Grid, LatencyTable
from softprune.errors import ConfigError, SoftpruneError
from softprune.lab.config.recipes import load_recipe
from softprune.lab.config.settings import MethodConfig, RunConfig, TrainConfig
from softprune.lab.runs.checkpoint import read_newest
from softprune.lab.train.method import check_method
from softprune.lab.train.run import resume, start

NETWORK = """
from torch import nn

def block(inputs, outputs, stride):
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

def net(num_classes):
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes)]
    return nn.Sequential(*block(1, 16, 2), *block(16, 24, 1), *block(24, 32, 2), *head)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "budget_networks.py").write_text(NETWORK)
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        '[model]\nname = "budget_networks:net"\n[data]\nbatch_size = 120\n[train]\nepochs = 3\nthreads = 1\n'
    )
    yield lambda *overrides: load_recipe(str(recipe), overrides)
    torch.set_num_threads(threads)
    sys.modules.pop("budget_networks", None)


def figures(run: Path):
    result = json.loads((run / "result.json").read_text())
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in result["epochs"]]
    return result, rows


def test_a_run_with_a_latency_target_goes_on_where_it_would_be_refused(config, tmp_path, monkeypatch):
    layers = {name: Grid([1, i], [1, o], [[0.1, 0.5], [0.5, 1.0]]) for name, i, o in (("3", 16, 24), ("6", 24, 32))}
    table = LatencyTable(Runtime(), "cpu", [], layers, {}, {}, [0.0, 2.0], [0.0, 2.0])
    measure = "softprune.budget.limit.measure_latency"
    monkeypatch.setattr(measure, lambda *_: table)
    start(config("method.target.latency=0.8"), tmp_path / "run", device="cpu", listener=StopAt(5))
    slow = replace(table, whole_ms=[18.0, 20.0])
    monkeypatch.setattr(measure, lambda *_: slow)
    with pytest.raises(ConfigError, match="must be within reach"):
        start(config("method.target.latency=0.8"), tmp_path / "new", device="cpu")
    table.save("device.json")
    given = config("method.target.latency=0.8", "method.latency_table=device.json")
    assert start(given, tmp_path / "given", device="cpu", listener=StopAt(1)).stopped
    assert load_recipe(str(tmp_path / "given" / "config.toml")).method.latency_table == str(tmp_path / "device.json")
    assert not resume(tmp_path / "run", device="cpu").stopped
    budget = read_newest(tmp_path / "run" / "checkpoints")[1]["stage"]["pruner"]["budget"]
    assert budget["table"] == asdict(table)


def test_a_recipes_target_is_met_and_a_stopped_run_ends_the_same(config, tmp_path):
    settings = config("method.target.macs=50%")
    assert settings.method.target == {"macs": "50%"}
    start(settings, tmp_path / "whole", device="cpu")
    result, rows = figures(tmp_path / "whole")
    limit = result["dense"]["macs"] // 2
    assert 0.95 * limit <= result["compact"]["macs"] <= limit
    assert [row["name"] for row in result["table"]] == ["dense", "masked", "compact"]
    assert result["table"][1]["top1"] == result["table"][2]["top1"] == rows[-1]["test_top1"]
    assert rows[0]["margin"] < 0 <= rows[-1]["margin"] < 0.05
    assert 0 < result["finalised_step"] <= rows[-1]["step"]
    assert start(settings, tmp_path / "pieces", device="cpu", listener=StopAt(17)).stopped
    resume(tmp_path / "pieces", device="cpu")
    assert figures(tmp_path / "pieces")[1] == rows
    whole, pieces = (read_newest(tmp_path / name / "checkpoints")[1] for name in ("whole", "pieces"))
    assert all(torch.equal(value, pieces["model"][name]) for name, value in whole["model"].items())
    budgets = [each["stage"]["pruner"]["budget"] for each in (whole, pieces)]
    assert torch.equal(budgets[0]["off_at"], budgets[1]["off_at"])


def test_a_network_that_is_cut_before_the_end_meets_the_target(config, tmp_path):
    settings = config("method.target.macs=50%")
    settings = settings.replace(train=settings.train.replace(compact_at=settings.train.epochs - 1))
    start(settings, tmp_path / "whole", device="cpu")
    result, rows = figures(tmp_path / "whole")
    limit = result["dense"]["macs"] // 2
    assert 0.95 * limit <= result["compact"]["macs"] <= limit
    assert 0 < result["finalised_step"] <= rows[-2]["step"]
    assert start(settings, tmp_path / "pieces", device="cpu", listener=StopAt(rows[-2]["step"] + 1)).stopped
    resume(tmp_path / "pieces", device="cpu")
    again, pieces = figures(tmp_path / "pieces")
    assert pieces == rows
    assert again["finalised_step"] == result["finalised_step"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("method.target.watts=0.5",), "macs, flops, params, activations, channels, latency"),
        (("method.target.macs=0.5", "method.name=dense"), "does not prune"),
        (
            ("method.target.macs=0.5", "train.compact_at=1"),
            r"at least final_at = 0.6 of train.epochs = \d+, .* Got 1; use",
        ),
    ],
)
def test_wrong_targets_are_refused_before_a_run(config, overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_a_target_needs_a_method_that_can_pursue_it():
    with pytest.raises(ConfigError, match="supports targets: scp, slimming"):
        check_method(RunConfig(method=MethodConfig(name="sss", target={"macs": 0.5})))
    RunConfig(method=MethodConfig(target={"macs": 0.5}), train=TrainConfig(epochs=1))


def test_a_training_that_loses_what_the_weights_knew_says_so(config, tmp_path, caplog):
    start(config("method.name=dense", "train.epochs=2"), tmp_path / "dense", device="cpu")
    pruning = config(f"model.weights={tmp_path / 'dense'}", "method.target.macs=0.5", "optimizer.lr=20.0")
    with suppress(SoftpruneError):  # it may diverge
        start(pruning, tmp_path / "run", device="cpu")
    assert "the initial weights had" in caplog.text
