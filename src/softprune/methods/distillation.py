"""Knowledge distillation: a loss that trains a network on the outputs of another one.

teacher = dense_network.eval()
with torch.no_grad():
    targets = teacher(images)
loss = pruner.loss(softprune.distillation_loss(model(images), targets, labels))
"""

import torch.nn.functional as F
from torch import Tensor

from softprune.errors import ConfigError


def distillation_loss(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, weight: float = 0.5, temperature: float = 2.0
) -> Tensor:
    """Return ``(1 - weight) * cross_entropy + weight * temperature * KL(teacher || student)``.

    The temperature is applied to both distributions of the divergence. The divergence is multiplied by the temperature,
    not by its square as in Hinton et al. (2015): its gradient with respect to the logits is then a difference of two
    probability vectors, as for the cross-entropy, which it can replace at the same learning rate. With the square, a
    temperature of 4 acts like an up to four times larger learning rate.

    Args:
        student_logits: Outputs of the trained network, (batch, classes).
        teacher_logits: Outputs of the teacher for the same inputs. No gradient is computed for them.
        labels: Class indices or class probabilities.
        weight: Weight of the divergence, from 0 to 1; the cross-entropy has one minus this weight.
        temperature: Softmax temperature, above 0. Larger values increase the influence of the wrong classes.
    """
    if not 0 <= weight <= 1:
        raise ConfigError(f"`weight`, the teacher's share of the loss, must be from 0 to 1. Got {weight!r}.")
    if not temperature > 0:
        raise ConfigError(f"`temperature` must be above 0. Got {temperature!r}; try 2.")
    if student_logits.shape != teacher_logits.shape:
        raise ConfigError(
            "teacher and student must have outputs of the same shape. Got "
            f"{tuple(teacher_logits.shape)} and {tuple(student_logits.shape)}; use a teacher with the same classes."
        )
    shape = tuple(student_logits.shape)
    if len(shape) < 2 or shape[1] < 2 or (labels.is_floating_point() and tuple(labels.shape) != shape):
        raise ConfigError(
            "`distillation_loss` is for classification: outputs (batch, classes) with at least two classes, and labels "
            "that are class indices, or probabilities with the shape of the outputs. Got outputs "
            f"{shape} and labels {tuple(labels.shape)} of {labels.dtype}; for other tasks, add a loss between both "
            "outputs to yours, such as F.mse_loss(student, teacher)."
        )
    task = F.cross_entropy(student_logits, labels)
    if weight == 0:
        return task
    # Probabilities in half precision are too coarse.
    student = F.log_softmax(student_logits.float() / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits.detach().float() / temperature, dim=1)
    divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    # "batchmean" divides by the batch size only, but dense predictions must be averaged over positions too.
    positions = student[0, 0].numel()
    return (1 - weight) * task + weight * temperature / positions * divergence
