"""Latency tables: the arithmetic on made-up times, and a real measurement that only has to be sane."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

import softprune as sp
from softprune.bench import Runtime, Timing
from softprune.budget import latency_table
from softprune.budget.latency import Grid, LatencyTable, measure_latency, measured_widths
from softprune.cut import make_plan
from softprune.errors import ConfigError
from softprune.graph import Example, trace
from softprune.methods import L1Pruner


def network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 24, 3, groups=2),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def chain():
    layers = list(network())
    return nn.Sequential(*layers[:3], nn.Conv2d(16, 24, 3), *layers[5:])


EXAMPLE = torch.zeros(2, 3, 8, 8)


def test_times_between_the_measured_widths_are_interpolated():
    grid = Grid([4, 8], [10, 20], [[1.0, 2.0], [3.0, 4.0]])
    assert grid(4, 10) == 1.0
    assert grid(6, 10) == 2.0
    assert grid(6, 15) == 2.5
    assert grid(1, 1) == 1.0, "below the smallest measured width nothing is promised"
    assert Grid.total([grid, grid, grid])(8, 20) == 12.0


@pytest.mark.parametrize(
    ("width", "multiple", "widths"),
    [
        (3, 8, [3]),
        (16, 8, [8, 16]),
        (20, 8, [8, 16, 20]),
        (64, 8, [8, 16, 32, 40, 56, 64]),
        (64, 32, [32, 64]),
        (8, 32, [8]),
        (64, 1, [1, 13, 27, 39, 53, 64]),
    ],
)
def test_widths_are_measured_that_a_cut_can_have(width, multiple, widths):
    assert measured_widths(width, multiple) == widths


def made_up_table(**changes):
    layer, norm = Grid([1, 16], [1, 24], [[0.1, 1.0], [1.0, 2.0]]), Grid([1], [1, 16], [[0.0, 0.16]])
    values = {
        "runtime": Runtime(),
        "device": "cpu",
        "shapes": [list(EXAMPLE.shape[1:])],
        "layers": {"3": layer},
        "norms": {"1": norm},
        "indices": {},
        "parts_ms": [0.0, 2.16],
        "whole_ms": [0.5, 2.66],
    }
    return LatencyTable(**{**values, **changes})


def test_a_plan_costs_the_sum_of_its_parts_corrected_by_whole_networks():
    model = chain()
    graph = trace(model, EXAMPLE)
    dense = make_plan(graph, model, {})
    assert made_up_table()(dense) == pytest.approx(0.5 + 2.0 + 0.16)
    half = make_plan(graph, model, {"1": torch.arange(16) % 8 < 4})
    assert len(half.modules["1"].outputs) == 8
    parts = made_up_table().parts(half)
    assert made_up_table()(half) == pytest.approx(0.5 + parts)
    corrected = made_up_table(parts_ms=[0.0, parts, 2.16], whole_ms=[0.5, 0.9, 2.66])
    assert (corrected(half), corrected(dense)) == (pytest.approx(0.9), pytest.approx(2.66))


def test_a_table_survives_as_plain_values():
    table = made_up_table()
    assert LatencyTable.read(asdict(table)) == table


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_every_kind_of_layer_is_measured_and_the_model_left_alone(backend):
    if backend == "onnxruntime":
        pytest.importorskip("onnxruntime", reason='the "onnx" extra is not installed')
    model = network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    runtime = Runtime(backend=backend, batch=4, threads=1)
    table = measure_latency(trace(model, EXAMPLE), model, EXAMPLE, runtime, 8)
    assert (table.runtime, table.device) == (runtime, "cpu")
    assert set(table.layers) == {"0", "3", "4", "9"}
    assert set(table.norms) == ({"1", "5"} if backend == "eager" else set())
    assert all(value > 0 for grid in table.layers.values() for row in grid.ms for value in row)
    assert table.parts_ms == sorted(table.parts_ms)
    assert table.whole_ms == sorted(table.whole_ms)
    dense = make_plan(trace(model, EXAMPLE), model, {})
    assert table(dense) == pytest.approx(table.dense_ms)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Pyramid(nn.Module):
    """One head for two sizes, and a second module with its weights and another stride."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.head, self.norm, self.again = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, 2)
        self.again.weight, self.again.bias = self.head.weight, self.head.bias

    def forward(self, x):
        x = self.stem(x)
        levels = [torch.relu(self.norm(self.head(level))) for level in (x, x[..., ::2, ::2])]
        return [*levels, self.again(x)]


@pytest.fixture
def times(monkeypatch):
    """A clock that counts the outputs of a part, and one millisecond for a whole network."""
    seen = []

    def parts(self, each):
        outputs = [part(x) for part, x in each]
        seen.extend(outputs)
        return [float(len(output[0].flatten())) for output in outputs]

    monkeypatch.setattr("softprune.budget.latency._Parts._times", parts)
    monkeypatch.setattr(Runtime, "time", lambda self, networks, example: dict.fromkeys(networks, Timing((1.0,))))
    return seen


def test_layers_are_timed_in_the_precision_of_the_runtime(times):
    latency_table(network().double(), EXAMPLE)
    assert {output.dtype for output in times} == {torch.float64}
    times.clear()
    latency_table(network(), EXAMPLE, runtime=Runtime(dtype="bfloat16"))
    assert {output.dtype for output in times} == {torch.bfloat16}


def test_every_call_of_a_layer_counts_at_its_size(times):
    table = latency_table(Pyramid(), EXAMPLE)  # the "time" is the outputs of one sample
    assert (table.layers["head"](8, 8), table.layers["again"](8, 8)) == (8 * (64 + 16), 8 * 16)
    assert table.norms["norm"](1, 8) == table.indices["norm"](1, 8) == 8 * (64 + 16)


class Tokens(nn.Module):
    """A linear layer along the last dimension, in front of which a cut puts no index, and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.stem(x))).flatten(2).mT)


def test_an_index_is_timed_where_a_cut_may_put_one(times):
    table = latency_table(Tokens(), EXAMPLE)
    assert set(table.layers) == {"stem", "last"}
    assert set(table.indices) == {"stem", "norm"}


@pytest.mark.parametrize(("measured", "level"), [(2.7, "INFO"), (3.5, "WARNING")])
def test_the_report_warns_where_the_table_is_wrong(measured, level, monkeypatch, caplog):
    monkeypatch.setattr(Runtime, "time", lambda self, networks, example: {"compact": Timing((measured, 9.0))})
    model = chain()
    plan = make_plan(trace(model, EXAMPLE), model, {})
    with caplog.at_level("INFO", logger="softprune"):
        assert made_up_table().report(plan, model, Example.of(EXAMPLE)) == measured
        for other in ({"device": "another"}, {"shapes": [[3, 224, 224]]}):
            assert made_up_table(**other).report(plan, model, Example.of(EXAMPLE)) is None
    assert [record.levelname for record in caplog.records] == [level, "INFO", "INFO"]


@pytest.mark.parametrize("rest_ms", [20.0, 0.5])
def test_a_target_out_of_reach_says_what_no_channel_takes(monkeypatch, rest_ms):
    def table(*_):
        floor = Grid([1, 16], [1, 24], [[0.9, 1.0], [1.0, 1.0]])
        return made_up_table(layers={"3": floor}, norms={}, parts_ms=[0.0, 1.0], whole_ms=[rest_ms, 1.0 + rest_ms])

    monkeypatch.setattr("softprune.budget.limit.measure_latency", table)
    with pytest.raises(ConfigError, match="must be within reach") as refused:
        sp.SoftPruner(chain(), EXAMPLE, target={"latency": 0.5}, total_steps=10)
    assert f"Of the dense {rest_ms + 1:g} ms, {rest_ms:g} ms belong to no layer" in str(refused.value)
    assert "with a larger batch" in str(refused.value)


def test_a_latency_target_is_met_by_the_table_and_resumes_with_it(monkeypatch, caplog):
    # A made-up clock: what is measured depends on sizes alone, so that the test does not on the machine.
    calls = {"made": 0}

    def fake_table(graph, model, example, runtime, round_to):
        calls["made"] += 1
        widths = {"0": (3, 16), "3": (16, 24), "8": (24, 5)}
        layers = {
            name: Grid([1, i], [1, o], [[calls["made"] * 0.01, 0.5], [0.5, 1.0]]) for name, (i, o) in widths.items()
        }
        return made_up_table(layers=layers, norms={}, parts_ms=[0.0, 3.0], whole_ms=[0.5, 3.5], runtime=runtime)

    monkeypatch.setattr("softprune.budget.limit.measure_latency", fake_table)
    pruner = sp.SoftPruner(chain(), EXAMPLE, target={"latency": 0.8}, total_steps=10)
    assert pruner.budget.dense == pytest.approx(3.5)
    with caplog.at_level("INFO", logger="softprune"):
        pruner.decide()
        pruner.compact()
    assert "measured here in eager" in caplog.text
    kept = pruner.budget.table(pruner.plan())
    assert 0.98 * 2.8 < kept <= 2.8
    other = sp.SoftPruner(chain(), EXAMPLE, target={"latency": 0.8}, total_steps=10)
    assert other.budget.table != pruner.budget.table
    other.load_state_dict(pruner.state_dict())
    assert other.budget.table == pruner.budget.table
    assert other.budget.limit == pruner.budget.limit


def test_a_table_of_another_machine_is_pursued(tmp_path, monkeypatch):
    table = made_up_table()
    table.save(tmp_path / "device.json")
    monkeypatch.setattr("softprune.budget.limit.measure_latency", None)  # nothing is measured again
    for given in (table, asdict(table), str(tmp_path / "device.json")):
        pruner = sp.SoftPruner(chain(), EXAMPLE, target={"latency": 0.8}, total_steps=10, latency_table=given)
        assert pruner.budget.table == table
        assert pruner.budget.dense == pytest.approx(table.dense_ms, rel=0.01)
    ranked = L1Pruner(chain(), EXAMPLE, target={"latency": 0.8}, latency_table=table)
    assert ranked.status.limit == pruner.budget.limit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latency_table": "nowhere.json"}, "must be a result of.*Got 'nowhere.json': .*No such file"),
        ({"latency_table": {"device": "cpu"}}, "must be a result of.*Got other fields"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        sp.SoftPruner(chain(), EXAMPLE, **{"target": {"latency": 0.9}, "total_steps": 10, **settings})


def test_a_table_of_another_network_is_refused():
    wide = Grid([1, 3], [1, 32], [[0.5, 0.5], [0.5, 1.0]])
    table = made_up_table(layers={"0": wide}, norms={})
    with pytest.raises(ConfigError, match=r"Got a table whose layer '0' is missing here or has another width"):
        sp.SoftPruner(chain(), EXAMPLE, target={"latency": 0.9}, total_steps=10, latency_table=table)
