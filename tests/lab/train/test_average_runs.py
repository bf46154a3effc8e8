"""Runs with a moving average of the weights: the average is what is tested, cut and written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_config

import softprune
from softprune.errors import ConfigError
from softprune.lab.config.settings import RunConfig
from softprune.lab.data import load_data
from softprune.lab.runs.networks import build_network
from softprune.lab.train.evaluate import EvalStep
from softprune.lab.train.from_checkpoint import compact_run
from softprune.lab.train.run import start

Tiny = Callable[..., RunConfig]


def test_a_fine_tuned_network_is_written_as_it_was_judged(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("train.ema=0.99", "train.epochs=2", "finetune.epochs=1", "finetune.lr=0.3")
    start(config, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    dense = build_network(config.model.name, 10)
    written = EvalStep(softprune.load(tmp_path / "run" / "compact.safetensors", dense), load_data("digits").test)()
    assert written.top1 == result["last"]["top1"] == result["table"][2]["top1"]
    assert written.loss == pytest.approx(result["epochs"][-1]["test_loss"], rel=1e-6)
    before = (tmp_path / "run" / "compact.safetensors").read_bytes()
    again, _, _ = compact_run(tmp_path / "run", tmp_path / "again", device="cpu", model="tiny_networks:tiny")
    assert again.read_bytes() == before


def test_an_average_goes_with_channels_last(tiny: Tiny, tmp_path: Path) -> None:
    plain = start(tiny("train.ema=0.9", "train.epochs=2"), tmp_path / "plain", device="cpu").result
    settings = ("train.ema=0.9", "train.epochs=2", "train.channels_last=true", "finetune.epochs=1")
    ordered = start(tiny(*settings), tmp_path / "ordered", device="cpu").result
    assert plain is not None
    assert ordered is not None
    # The memory order changes rounding only, and the average follows the weights from the first step on.
    assert ordered.epochs[0].test_loss == pytest.approx(plain.epochs[0].test_loss, rel=1e-2)
    assert ordered.table[2].top1 == ordered.last.top1


def test_an_average_is_not_lost_in_a_cut_in_mid_training(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.ema cannot be combined with train\.compact_at.*set one of them to 0"
    ):
        tiny_config(tmp_path, "train.ema=0.9", "train.compact_at=2")


@pytest.mark.parametrize("finetune", [0, 1])
def test_compacting_a_recalibrated_run_again_changes_nothing(tiny: Tiny, tmp_path: Path, finetune: int) -> None:
    start(tiny("train.recalibrate=3", "train.epochs=2", f"finetune.epochs={finetune}"), tmp_path / "run")
    before = (tmp_path / "run" / "compact.safetensors").read_bytes()
    torch.manual_seed(99)
    compact_run(tmp_path / "run", device="cpu", model="tiny_networks:tiny")
    assert (tmp_path / "run" / "compact.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [(("finetune.epochs=1",), "was cut already"), (("train.recalibrate=3",), "belong to one cut")],
)
def test_a_cut_of_another_kind_is_refused_where_it_would_compute_something_else(
    tiny: Tiny, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    start(tiny("train.epochs=1", *settings), tmp_path / "run")
    for options in ({"round_to": 8}, {"gathers": False}):
        with pytest.raises(ConfigError, match=message):
            compact_run(tmp_path / "run", tmp_path / "other", device="cpu", **options, model="tiny_networks:tiny")
    assert not (tmp_path / "other").exists()
