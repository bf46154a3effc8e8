"""The callback for transformers' Trainer prunes while it trains, and resumes."""

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

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


def trainer(
    folder: Path, pruning: SoftPruningCallback, epochs: int = 4, compute_loss_func: Any = None, **settings: Any
) -> Any:
    defaults = {"per_device_train_batch_size": 8, "learning_rate": 0.01, "weight_decay": 0.01, "save_strategy": "epoch"}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        logging_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **(defaults | settings),
    )
    calls = itertools.count()
    made = transformers.Trainer(
        model=network(),
        args=arguments,
        train_dataset=images(),
        eval_dataset=images(),
        compute_metrics=lambda _: {"calls": next(calls)},
        callbacks=[pruning],
        compute_loss_func=compute_loss_func,
    )
    pruning.bind(made)
    return made


def test_a_target_is_met_and_a_resumed_training_ends_the_same(tmp_path: Path) -> None:
    pruning = SoftPruningCallback(EXAMPLE, target={"macs": 0.7})
    whole = trainer(tmp_path, pruning)
    with mock.patch.object(pruning.pruner, "metrics", wraps=pruning.pruner.metrics) as metrics:
        whole.train()
    assert metrics.call_count == 2  # in the first and the last of four logs within 100 steps
    assert int(pruning.pruner.clock.step) == 16
    status = pruning.pruner.status
    logged = [row for row in whole.state.log_history if "softprune_channels_kept" in row]
    assert 0 <= logged[-1]["softprune_margin"] == pytest.approx(status.margin)
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


def test_a_checkpoint_elsewhere_is_resumed_with_its_pruner(tmp_path: Path) -> None:
    trainer(tmp_path / "first", SoftPruningCallback(EXAMPLE, target={"macs": 0.7}), epochs=2).train()
    checkpoint = (tmp_path / "first" / "checkpoint-4").rename(tmp_path / "moved")
    pruning = SoftPruningCallback(EXAMPLE, target={"macs": 0.7})
    trainer(tmp_path / "second", pruning, epochs=2).train(str(checkpoint))
    assert int(pruning.pruner.clock.step) == 8

    (checkpoint / "softprune.pt").unlink()
    with pytest.raises(FileNotFoundError, match="softprune"):
        trainer(tmp_path / "third", SoftPruningCallback(EXAMPLE, target={"macs": 0.7}), epochs=2).train(checkpoint)


@pytest.mark.parametrize("batch", [16, 8])
def test_the_sparsity_loss_is_added_once_however_many_micro_batches_a_step_has(tmp_path: Path, batch: int) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    pruning = SoftPruningCallback(EXAMPLE, strength=1.0)
    made = trainer(
        tmp_path,
        pruning,
        epochs=1,
        compute_loss_func=loss,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=16 // batch,
        learning_rate=1e-9,
    )
    trained = made.train().training_loss
    penalty = float(pruning.pruner.penalty)
    assert penalty < trained < 1.1 * penalty


def test_an_incomplete_accumulation_counts_as_a_step(tmp_path: Path) -> None:
    pruning = SoftPruningCallback(EXAMPLE, target={"macs": 0.7})
    made = trainer(tmp_path, pruning, epochs=2, gradient_accumulation_steps=3, save_strategy="no")  # 4 batches: 2 steps
    made.train()
    assert pruning.pruner.budget.total_steps == made.state.max_steps == int(pruning.pruner.clock.step) == 4


def test_the_best_checkpoint_is_cut_with_its_own_masks(tmp_path: Path) -> None:
    pruning = SoftPruningCallback(EXAMPLE, target={"macs": 0.7})
    settings = {"metric_for_best_model": "calls", "greater_is_better": False, "load_best_model_at_end": True}
    trainer(tmp_path, pruning, eval_strategy="epoch", **settings).train()  # the first epoch is the best
    assert int(pruning.pruner.clock.step) == 4
    assert pruning.pruner.status.finalised_step is None


def test_a_callback_without_its_trainer_is_refused(tmp_path: Path) -> None:
    pruning = SoftPruningCallback(EXAMPLE)
    made = trainer(tmp_path, pruning, epochs=1)
    made.model_init = network
    with pytest.raises(ConfigError, match=r"pass model=model_init\(\) instead"):
        SoftPruningCallback(EXAMPLE).bind(made)
    with pytest.raises(ConfigError, match="`compact` needs a trained network"):
        SoftPruningCallback(EXAMPLE).compact()
