"""Hooks that a method registers on modules."""

import copy
from typing import Any

import torch
from method_networks import Chain, batch, sgd, train
from torch import Tensor, nn

from softprune.methods import RankingPruner


class ByActivity(RankingPruner):
    """Keeps the channels with the largest outputs, and counts the gradients it sees."""

    name = "activity"

    def __init__(self, model: nn.Module, example: Tensor, **options: Any) -> None:
        super().__init__(model, example, **options)
        self.sums = {norm: torch.zeros_like(norm.weight) for norm in self.norms.values()}
        self.backward = 0
        for norm in self.norms.values():
            norm.register_forward_hook(self.note)
        model.get_submodule("3").register_full_backward_hook(self.note_gradient)

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training and module in self.sums:
            self.sums[module].add_(output.detach().abs().sum((0, 2, 3)))

    def note_gradient(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.backward += 1

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: self.sums[norm] for name, norm in self.norms.items()}


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules())


def test_hooks_of_a_method_act_on_its_model_and_leave_with_the_masks() -> None:
    torch.manual_seed(0)
    model = Chain()
    kept = model[0].register_forward_hook(lambda *_: None)  # the user's own
    pruner = ByActivity(model, batch()[0], ratio=0.5)
    train(pruner, sgd(pruner), 2)
    assert pruner.backward == 2
    before = {name: scores.clone() for name, scores in pruner.scores(model).items()}
    assert all(scores.any() for scores in before.values())
    copy.deepcopy(model).train()(batch()[0])
    averaged = copy.deepcopy(model)
    assert hooks_of(pruner.compact(averaged)) == 1
    compact = pruner.compact().train()
    compact(batch()[0]).sum().backward()
    assert {name: scores.tolist() for name, scores in pruner.scores(model).items()} == {
        name: scores.tolist() for name, scores in before.items()
    }
    assert pruner.backward == 2
    assert hooks_of(compact) == hooks_of(pruner.detach()) == 1
    kept.remove()
