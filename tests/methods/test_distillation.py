"""The distillation loss: its value, its gradient's size, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F

import softprune as sp
from softprune.errors import ConfigError


def logits(seed: int, classes: int = 10) -> torch.Tensor:
    return 5 * torch.randn(16, classes, generator=torch.Generator().manual_seed(seed))


LABELS = torch.arange(16) % 10


def test_it_is_the_formula() -> None:
    student, teacher = logits(0), logits(1)
    soft, softer = (teacher / 3).softmax(1), (student / 3).softmax(1)
    divergence = (soft * (soft.log() - softer.log())).sum(1).mean()
    expected = 0.7 * F.cross_entropy(student, LABELS) + 0.3 * 3 * divergence
    loss = sp.distillation_loss(student, teacher, LABELS, weight=0.3, temperature=3.0)
    torch.testing.assert_close(loss, expected)


def test_without_weight_it_is_the_cross_entropy_and_a_perfect_student_has_no_gradient_from_the_teacher() -> None:
    student = logits(0)
    assert sp.distillation_loss(student, logits(1), LABELS, weight=0).equal(F.cross_entropy(student, LABELS))
    same = student.clone().requires_grad_()
    sp.distillation_loss(same, student, LABELS, weight=1).backward()
    assert same.grad is not None
    assert same.grad.abs().max() < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_its_gradient_is_bounded_like_the_cross_entropys_at_any_temperature(temperature: float) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    sp.distillation_loss(student, teacher, LABELS, weight=1, temperature=temperature).backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert (16 * student.grad.abs().sum(1)).max() <= 2.0 + 1e-5


def test_dense_predictions_are_averaged_over_positions() -> None:
    student, teacher = logits(0), logits(1)
    flat = sp.distillation_loss(student, teacher, LABELS)
    maps = [each.reshape(4, 4, 10).permute(0, 2, 1) for each in (student, teacher)]
    torch.testing.assert_close(sp.distillation_loss(*maps, LABELS.reshape(4, 4)), flat)


@pytest.mark.parametrize(
    ("settings", "message"), [({"weight": 1.5}, "teacher's share"), ({"temperature": float("nan")}, "above 0")]
)
def test_wrong_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sp.distillation_loss(logits(0), logits(1), LABELS, **settings)


@pytest.mark.parametrize(
    ("outputs", "labels"), [((16, 10), (16,)), ((16, 1), (16, 1)), ((16,), (16,)), ((16, 10), (16, 9))]
)
def test_other_tasks_than_classification_are_refused(outputs: tuple[int, ...], labels: tuple[int, ...]) -> None:
    """One output would be a distribution of one class, whose losses are all zero."""
    with pytest.raises(ConfigError, match=r"for classification.*Got outputs .* of torch.float32; for other tasks"):
        sp.distillation_loss(torch.zeros(outputs), torch.zeros(outputs), torch.zeros(labels))
