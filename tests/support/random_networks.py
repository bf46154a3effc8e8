"""Random networks for property tests: blocks of every kind, composed at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from comparing import assert_exact, random_masks
from hypothesis import strategies as st
from topologies import randomise_
from torch import Tensor, nn

from softprune.costs import cost
from softprune.cut import apply_plan, make_plan
from softprune.cut.selection import read_graph

ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "hardswish": nn.Hardswish,
}
KINDS = (
    "conv",
    "residual",
    "pre-activation",
    "concat",
    "depthwise",
    "grouped",
    "many groups",
    "squeeze-excite",
    "shuffle",
    "option-A",
    "halves",
    "pool",
    "branches",
    "projection",
    "linear",
    "functional",
    "decoder",
    "tied",
    "repeated",
    "quotient",
)


@dataclass(frozen=True)
class Block:
    """One block: its kind, how wide it is inside, and whether its layers have biases."""

    kind: str
    width: int
    kernel: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Spec:
    """A whole network."""

    stem: int
    stem_norm: bool
    blocks: tuple[Block, ...]
    head: str
    seed: int


blocks = st.builds(
    Block,
    kind=st.sampled_from(KINDS),
    width=st.integers(1, 4).map(lambda quarter: 2 * quarter),
    kernel=st.sampled_from([1, 3]),
    bias=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
specs = st.builds(
    Spec,
    stem=st.integers(1, 4).map(lambda quarter: 2 * quarter),
    stem_norm=st.booleans(),
    blocks=st.lists(blocks, min_size=1, max_size=6).map(tuple),
    head=st.sampled_from(["pool", "flatten", "norm", "two"]),
    seed=st.integers(0, 2**16),
)


class Unit(nn.Module):
    """Convolution, BatchNorm, activation."""

    def __init__(self, inputs: int, outputs: int, block: Block, *, groups: int = 1, stride: int = 1) -> None:
        super().__init__()
        pad = block.kernel // 2
        self.conv = nn.Conv2d(inputs, outputs, block.kernel, stride=stride, padding=pad, groups=groups, bias=block.bias)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = ACTIVATIONS[block.activation]()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Sequence(nn.Module):
    """A block of any kind; `self.outputs` is the width it gives."""

    def __init__(self, inputs: int, block: Block) -> None:
        super().__init__()
        self.kind, self.outputs = block.kind, inputs
        width = block.width
        if self.kind in ("conv", "concat"):
            self.first = Unit(inputs, width, block)
            self.outputs = width if self.kind == "conv" else inputs + width
        elif self.kind == "residual":
            self.first = Unit(inputs, width, block)
            self.conv, self.bn = nn.Conv2d(width, inputs, 1, bias=block.bias), nn.BatchNorm2d(inputs)
            self.act = ACTIVATIONS[block.activation]()
        elif self.kind == "pre-activation":
            self.bn, self.act = nn.BatchNorm2d(inputs), ACTIVATIONS[block.activation]()
            self.first = Unit(inputs, width, block)
            self.conv = nn.Conv2d(width, inputs, block.kernel, padding=block.kernel // 2, bias=block.bias)
        elif self.kind == "depthwise":
            self.first = Unit(inputs, inputs, block, groups=inputs)
            self.second = Unit(inputs, width, Block("conv", width, 1, block.bias, block.activation))
            self.outputs = width
        elif self.kind == "grouped":
            self.first = Unit(inputs, 2 * width, block, groups=2)
            self.outputs = 2 * width
        elif self.kind == "many groups":  # of two inputs, with two or four outputs
            self.groups, self.outputs = width, (4 if block.bias else 2) * width
            self.first = Unit(inputs, 2 * width, block)
            self.second = Unit(2 * width, self.outputs, block, groups=width)
            self.third = Unit(self.outputs, self.outputs, block, groups=self.outputs)
        elif self.kind == "squeeze-excite":
            self.squeeze, self.excite = nn.Conv2d(inputs, width, 1), nn.Conv2d(width, inputs, 1)
        elif self.kind == "option-A":
            self.first = Unit(inputs, inputs + 2, block, stride=2)
            self.conv = nn.Conv2d(inputs + 2, inputs + 2, 3, padding=1, bias=block.bias)
            self.bn, self.act = nn.BatchNorm2d(inputs + 2), ACTIVATIONS[block.activation]()
            self.outputs = inputs + 2
        elif self.kind == "halves":
            self.first = Unit(inputs // 2, inputs // 2, block)
        elif self.kind in ("branches", "projection"):
            self.outputs = inputs if self.kind == "branches" else width
            self.first = Unit(inputs, self.outputs, block)
            self.short, self.bn = nn.Conv2d(inputs, self.outputs, 1), nn.BatchNorm2d(self.outputs)
            self.same = nn.BatchNorm2d(inputs)
        elif self.kind in ("linear", "functional"):
            self.first = Unit(inputs, width, block)
            self.outputs = width
        elif self.kind == "decoder":
            self.first = Unit(inputs, width, block)
        elif self.kind == "tied":
            self.first, self.second = Unit(inputs, inputs, block), Unit(inputs, inputs, block)
            self.second.conv.weight = self.first.conv.weight
        elif self.kind == "repeated":
            self.first = Unit(inputs, inputs, block)
        elif self.kind == "quotient":
            self.register_buffer("each", torch.arange(1, inputs + 1, dtype=torch.uint8).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "residual":
            return self.act(x + self.bn(self.conv(self.first(x))))
        if self.kind == "pre-activation":
            return x + self.conv(self.first(self.act(self.bn(x))))
        if self.kind == "concat":
            return torch.cat([x, self.first(x)], 1)
        if self.kind == "depthwise":
            return self.second(self.first(x))
        if self.kind == "squeeze-excite":
            gate = self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True))))
            return x * torch.sigmoid(gate)
        if self.kind == "many groups":
            return _shuffled(self.third(self.second(self.first(x))), self.groups)
        if self.kind == "shuffle":
            return _shuffled(x, 2)
        if self.kind == "option-A":
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))
            return self.act(shortcut + self.bn(self.conv(self.first(x))))
        if self.kind == "halves":
            left, right = x.chunk(2, 1)
            return torch.cat([self.first(left), right], 1)
        if self.kind == "branches":
            first = self.first
            return first.act(first.bn(first.conv(x)) + self.bn(self.short(x)) + self.same(x))
        if self.kind == "projection":
            return self.first.act(self.first.bn(self.first.conv(x)) + self.bn(self.short(x)))
        if self.kind == "linear":
            return self.first.bn(self.first.conv(x))
        if self.kind == "functional":
            conv = self.first.conv
            x = F.conv2d(x, conv.weight, conv.bias, padding=conv.padding)  # type: ignore[arg-type]
            return self.first.act(self.first.bn(x))
        if self.kind == "decoder":
            conv = self.first.conv
            return F.conv_transpose2d(self.first(x), conv.weight, padding=conv.padding)  # type: ignore[arg-type]
        if self.kind == "tied":
            return self.second(self.first(x))
        if self.kind == "repeated":
            return self.first(self.first(x))
        if self.kind == "quotient":  # by a tensor of the network and by integers, which wrap around
            each: Tensor = self.each  # type: ignore[assignment]
            return x / (x.mean((2, 3), keepdim=True).abs() + torch.tensor(0.5)) / each + each * 100
        if self.kind == "pool":
            return F.avg_pool2d(x, 2, ceil_mode=True)
        return self.first(x)


def _shuffled(x: Tensor, groups: int) -> Tensor:
    batch, width, height, across = x.shape
    rows = x.reshape(batch, groups, width // groups, height, across)
    return rows.transpose(1, 2).reshape(batch, width, height, across)


class RandomNet(nn.Module):
    """A stem, blocks, and one of several heads."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.stem = nn.Conv2d(3, spec.stem, 3, padding=1)
        self.bn = nn.BatchNorm2d(spec.stem) if spec.stem_norm else None
        width, self.blocks = spec.stem, nn.ModuleList()
        for block in spec.blocks:
            self.blocks.append(Sequence(width, block))
            width = self.blocks[-1].outputs  # type: ignore[assignment]
        self.head = spec.head
        self.last = nn.BatchNorm2d(width) if spec.head == "norm" else None
        self.fc = nn.Linear(4 * width if spec.head == "flatten" else width, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x)
        if self.bn is not None:
            x = F.relu(self.bn(x))
        for block in self.blocks:
            x = block(x)
        if self.last is not None:
            x = F.relu(self.last(x))
        if self.head == "flatten":
            return self.fc(F.adaptive_max_pool2d(x, 2).flatten(1))
        logits = self.fc(x.mean((2, 3)))
        return (logits, x) if self.head == "two" else logits


def assert_sound(spec: Spec, number: int, kinds: set[str], *, deaths: tuple[float, ...]) -> None:
    """masked == compact under random masks, one set for each chance of a site to die, and the plan is what is left."""
    model = randomise_(RandomNet(spec), spec.seed)
    example = torch.randn(2, 3, 8, 8)
    graph = read_graph(model, example, kinds=kinds)
    assert not graph.unknown
    # A view that is the same for two channels and two groups may be taken for a literal; nothing else may fail.
    assert not [frozen for frozen in graph.frozen if "trial" in frozen.reason]
    for offset, chance in enumerate(deaths):
        masks = random_masks(graph, number + offset, deaths=chance)
        plan = assert_exact(graph, model, masks)
        counted = cost(apply_plan(plan, model), example)
        assert (counted.macs, counted.params) == (plan.macs, plan.params)
    everything = make_plan(graph, model, {})
    assert (everything.macs, everything.params) == (everything.dense_macs, everything.dense_params)
