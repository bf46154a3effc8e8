"""The callback for transformers' Trainer prunes while it trains, and resumes."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import softprune as sp
from softprune.errors import ConfigError

transformers = pytest.importorskip("transformers", reason='the "transformers" extra is not installed')
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from softprune.integrations.transformers import SoftPruningCallback  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # transformers' own warnings

EXAMPLE: Any = ((), {"pixel_values": torch.zeros(2, 3, 16, 16)})


def network() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


def images() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.randn(3, 16, 16, generator=generator) + label, "labels": label}
        for label in [0, 1, 2, 3] * 8
    ]


def trainer(folder: Path, pruning: SoftPruningCallback, epochs: int = 4, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        weight_decay=0.01,
        save_strategy="epoch",
        logging_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    calls = itertools.count()
    made = transformers.Trainer(
        model=network(),
        args=arguments,
        train_dataset=images(),
        eval_dataset=images(),
        compute_metrics=lambda _: {"calls": next(calls)},
        callbacks=[pruning],
    )
    pruning.bind(made)
    return made


def test_a_target_is_met_and_a_resumed_training_ends_the_same(tmp_path: Path) -> None:
    pruning = SoftPruningCallback(EXAMPLE, target={"macs": 0.7})
    whole = trainer(tmp_path, pruning)
    whole.train()
    assert pruning.pruner is not None
    assert int(pruning.pruner.clock.step) == 16
    assert any("softprune_channels_kept" in row for row in whole.state.log_history)
    status = pruning.pruner.status
    assert status is not None
    compact = pruning.compact()
    macs = sp.cost(compact, EXAMPLE).macs
    assert macs <= status.limit
    decayed = {id(p) for group in whole.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    shifts = [pruning.pruner.model.get_submodule(site.name).bias for site in pruning.pruner.sites]
    assert not any(id(shift) in decayed for shift in shifts)

    again = SoftPruningCallback(EXAMPLE, target={"macs": 0.7})
    resumed = trainer(tmp_path, again)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value)


def test_the_best_checkpoint_is_cut_with_its_own_masks(tmp_path: Path) -> None:
    pruning = SoftPruningCallback(EXAMPLE, target={"macs": 0.7})
    settings = {"metric_for_best_model": "calls", "greater_is_better": False, "load_best_model_at_end": True}
    trainer(tmp_path, pruning, eval_strategy="epoch", **settings).train()  # the first epoch is the best
    assert pruning.pruner is not None
    assert int(pruning.pruner.clock.step) == 4
    assert pruning.pruner.status is not None
    assert pruning.pruner.status.finalised_step is None


def test_a_callback_without_its_trainer_is_refused(tmp_path: Path) -> None:
    pruning = SoftPruningCallback(EXAMPLE)
    made = trainer(tmp_path, pruning, epochs=1)
    with pytest.raises(ConfigError, match="make another SoftPruningCallback"):
        pruning.bind(made)
    with pytest.raises(ConfigError, match="`compact` needs a trained network"):
        SoftPruningCallback(EXAMPLE).compact()
