"""What the trial cut says when it fails although nothing is cut: whose fault it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from topologies import Chain, PaddedStreams, Residual, conv, pooled, randomise_
from torch import Tensor, nn

import softprune
from softprune.cut import apply_plan, make_plan
from softprune.cut.selection import read_graph
from softprune.errors import ModelError
from softprune.graph.builder import GraphBuilder, Operator, Value
from softprune.graph.operators import OPERATORS


def forgets_one_side(builder: GraphBuilder, node: Any, entry: Any) -> Any:
    """A rule for a sum that reads the left one only."""
    builder.answer_for(node)
    value = builder.value(node.args[0])
    return Value(node.meta["val"].shape, builder.mapped(value.atoms, None))


def test_a_wrong_rule_freezes_the_network_and_is_called_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(OPERATORS, "add", Operator(forgets_one_side))
    model = randomise_(Residual())
    seen = softprune.inspect(model, torch.randn(2, 3, 8, 8))
    assert not seen.sites
    assert seen.floor_macs == seen.macs
    reasons = {frozen.name: frozen.reason for frozen in seen.frozen}
    assert "softprune misreads this network" in reasons["bn"]
    assert "copy" not in reasons["bn"]
    assert "softprune: Residual: softprune misreads this network" in caplog.text
    with pytest.raises(ModelError, match=r"softprune misreads this network.*please report"):
        softprune.SoftPruner(model, torch.randn(2, 3, 8, 8))


class Counted(Chain):
    """Each copy computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        twin = Counted()
        twin.load_state_dict(self.state_dict())
        twin.copies = self.copies + 1
        return twin.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.copies)


def test_a_network_whose_copies_differ_is_called_one() -> None:
    with pytest.raises(ModelError, match=r"Two copies of this Counted differed.*copy\.deepcopy"):
        softprune.inspect(randomise_(Counted()), torch.randn(2, 3, 8, 8))


def test_a_literal_size_is_found_in_a_network_that_insists_on_its_dtype() -> None:
    class Insists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = conv(8, 6), nn.BatchNorm2d(6)
            self.fc = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            x = F.relu(self.bn1(self.conv1(x)))
            x = x.view(-1, 2, 4, *x.shape[2:]).flatten(1, 2)
            x = x.view(-1, 4, 2, *x.shape[2:]).flatten(1, 2)  # only to be tried together with the other line
            return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))

    seen = softprune.inspect(randomise_(Insists()), torch.randn(2, 3, 8, 8))
    assert [site.name for site in seen.sites] == ["bn2"]
    assert "literal size" in seen.frozen[0].reason


def test_rounding_freezes_nothing() -> None:
    class Amplified(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
            return torch.sin(1e5 * self.fc(pooled(x) + 0.3))  # what is dead becomes a part of the bias

    assert len(softprune.inspect(randomise_(Amplified()), torch.randn(2, 3, 8, 8)).sites) == 2


class SplitAndViewed(nn.Module):
    """Two branches of a split with a literal size; their outputs meet in a view whose size follows the width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.first, self.bn1 = conv(4, 6), nn.BatchNorm2d(6)
        self.second, self.bn2 = conv(4, 6), nn.BatchNorm2d(6)
        self.beside, self.bn3 = conv(3, 6), nn.BatchNorm2d(6)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.relu(self.stem(x)).split(4, 1)
        first, second = F.relu(self.bn1(self.first(first))), F.relu(self.bn2(self.second(second)))
        both = torch.cat([first, second], 1)
        both = both.view(len(x), 2, both.shape[1] // 2, *x.shape[2:]).sum(1)
        return self.fc(torch.cat([pooled(both), pooled(F.relu(self.bn3(self.beside(x))))], 1))


def test_a_literal_size_that_matters_only_where_sites_die_together_freezes_no_site() -> None:
    # Without both branches nothing reads the stem; with the view frozen, no site could show that.
    assert [site.name for site in softprune.inspect(SplitAndViewed(), torch.randn(2, 3, 8, 8)).sites] == [
        "bn1",
        "bn2",
        "bn3",
    ]


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, 8 - x.shape[1]))


def joined(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(len(x), 8 - x.shape[1], *x.shape[2:])], 1)


@pytest.mark.parametrize(
    ("widened", "remedy"),
    [(padded, "F.pad(x, (0, 0, 0, 0, 0, 4))"), (joined, "x.new_zeros(x.shape[0], 4, ...)")],
    ids=["pad", "cat"],
)
def test_zero_channels_that_fill_up_to_a_width_freeze_the_streams_alone(
    monkeypatch: pytest.MonkeyPatch, widened: Callable[[Tensor], Tensor], remedy: str
) -> None:
    monkeypatch.setattr(PaddedStreams, "widened", lambda self, x: widened(x))
    for kinds, streams in ([["stream"], ["bn", "bn2", "bn4", "bn6"]], [["sum"], ["bn"]]):
        seen = softprune.inspect(PaddedStreams(0), torch.randn(2, 3, 8, 8), site_kinds=kinds)
        assert [site.name for site in seen.sites] == ["bn1", "bn3", "bn5"]
        reasons = [frozen.reason for frozen in seen.frozen if frozen.name in streams]
        assert all(f"number depends on theirs; write a literal, {remedy}" in reason for reason in reasons)


def test_sites_that_cannot_be_cut_freeze_no_channels_of_explicit_sizes() -> None:
    class Doubled(PaddedStreams):
        def forward(self, x: Tensor) -> Tensor:
            whole = (len(self.bn1.weight), len(self.bn3.weight), len(self.bn5.weight)) == (3, 5, 6)
            return super().forward(x) * (1 if whole else 2)

    # Without the explicit size, which freezes bn and bn4, more sites would be left, but their cut would be wrong.
    seen = softprune.inspect(randomise_(Doubled(0)), torch.randn(2, 3, 8, 8), site_kinds=["stream"])
    assert [site.name for site in seen.sites] == ["bn", "bn4"]
    assert [frozen.name for frozen in seen.frozen] == ["bn1", "bn3", "bn5"]


class Pieces(nn.Module):
    """Halves by a size that is an attribute, as ultralytics' C2f; `also` repeats it by accident."""

    def __init__(self, also: int) -> None:
        super().__init__()
        self.width, self.also = 4, also
        self.conv, self.bn, self.fc = conv(3, 8), nn.BatchNorm2d(8), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.relu(self.bn(self.conv(x))).split((self.width, self.width), 1)
        return self.fc(pooled(left + right)) * self.also


@pytest.mark.parametrize(("also", "sites"), [(3, ["bn"]), (4, [])])
def test_an_attribute_that_repeats_a_width_follows_the_cut(tmp_path: Path, also: int, sites: list[str]) -> None:
    model, images = randomise_(Pieces(also)), torch.randn(2, 3, 8, 8)
    graph = read_graph(model, images)
    assert [site.name for site in graph.sites] == sites
    if sites:
        small = apply_plan(make_plan(graph, model, {"bn": torch.arange(8) % 4 < 3}), model)
        assert (small.width, small.also, model.width) == (3, 3, 4)
        again = softprune.load(softprune.save(small, tmp_path / "small"), Pieces(also))
        assert again.width == 3
        assert torch.equal(again(images), small.eval()(images))


def test_an_attribute_that_repeats_a_width_by_accident_stays() -> None:
    class Accident(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 4

        def forward(self, x: Tensor) -> Tensor:
            left, right = F.relu(self.bn1(self.conv1(x))).chunk(2, 1)
            x = torch.cat([left * self.factor, right], 1)
            return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))

    assert [site.name for site in softprune.inspect(randomise_(Accident()), torch.randn(2, 3, 8, 8)).sites] == [
        "bn1",
        "bn2",
    ]


class Caching(Chain):
    """Training makes a buffer, of the width of its features, that every later call reads."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        if self.training and not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((1, x.shape[1], 1, 1), 2.0))
        x = x * self.scale if hasattr(self, "scale") else x
        return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))


def test_what_a_network_makes_while_it_trains_is_found_before() -> None:
    model = randomise_(Caching())
    pruner = softprune.SoftPruner(model, torch.randn(2, 3, 8, 8))
    assert not hasattr(model, "scale")
    assert [site.name for site in pruner.sites] == ["bn2"]
    assert "a trial cut of it failed (RuntimeError" in pruner.graph.frozen[0].reason
    model.train()(torch.randn(2, 3, 8, 8))
    pruner.compact()


def test_a_network_without_finite_outputs_is_refused() -> None:
    model = randomise_(Chain())
    model.bn2.running_var.fill_(-1.0)
    with pytest.raises(ModelError, match="only infinity and NaN"):
        softprune.SoftPruner(model, torch.randn(2, 3, 8, 8))
