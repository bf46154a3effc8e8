"""A target in pursuit: look at the network now and then, move the strength, and settle the cut that fits."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.budget.controller import Controller
from softprune.budget.latency import LatencyTable
from softprune.budget.measures import Measure
from softprune.budget.search import CLOSE, Cut, CutSearch
from softprune.config.target import TargetLike, read_target
from softprune.distributed import broadcast_from_rank0_
from softprune.errors import CheckpointError, ConfigError
from softprune.graph import ChannelGraph
from softprune.masks import MaskDecision, MaskedBatchNorm, SoftGate, alive_probability

logger = logging.getLogger(__name__)

SETTLE = 0.1
"""The share of the training, at its end, in which the decision is in force and the weights adapt to it ..."""
SETTLE_STEPS = 50
"""... but so many steps at least, in which running statistics forget the masks before, and half of all at most."""
MANY_ALIVE = 0.05
"""Share of all channels that may go although they are alive before it is said."""
EARLIEST = 0.25
"""The share of the training before which nothing is settled, however soon the target is met."""
_LOOKS = 100


class Budget:
    """Keeps one figure of a network below a limit at the end of a training of known length.

    At first the masks are soft, and :meth:`look` moves the strength. Once the method's own decision is within the
    limit, and in the last tenth (see ``SETTLE``) in any case, the cut that fits is settled: the masks are its masks
    from there on, in training as in evaluation, and the sparsity loss ends. Left alone, masks would go on to fall
    silent, and what is silent learns nothing any more: room left under the limit could only be filled with ballast.

    Args:
        target: One of macs, params, channels, latency with its amount, such as ``{"macs": 0.5}``.
        total_steps: Optimizer steps of the whole training.
        graph: The network's channel graph.
        network: The network, with masked sites.
        floors: The fewest channels that each site keeps.
        lines: Sites of which only the channels that all of them keep are left.
        round_to: Keep a multiple of this many channels.
        latency: The measured table, for a target of that kind.
    """

    def __init__(
        self,
        target: TargetLike,
        total_steps: int | None,
        *,
        graph: ChannelGraph,
        network: nn.Module,
        floors: Mapping[str, int],
        lines: Iterable[Sequence[str]] = (),
        round_to: int = 1,
        latency: LatencyTable | None = None,
    ) -> None:
        self.target = read_target(target)
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
            raise ConfigError(
                "`target` needs `total_steps`, the number of optimizer steps of the whole training, to arrive in time. "
                f"Got total_steps = {total_steps!r}."
            )
        self.total_steps = total_steps
        self.graph, self.network = graph, network
        self.floors, self.lines, self.round_to = dict(floors), [*lines], round_to
        self._use(latency)
        self._check_possible()
        self.controller = Controller(total_steps)
        self.every = max(1, total_steps // _LOOKS)
        self.settle_at = self._latest()
        self._near: int | None = None
        self.decision = MaskDecision(next(network.parameters()).device)
        for site in graph.sites:
            gate = self._gate(site.name)
            gate.override = torch.ones(site.width, dtype=torch.bool, device=self.decision.in_force.device)
            gate.decision = self.decision

    def _use(self, latency: LatencyTable | None) -> None:
        self.latency = latency
        self.measure = Measure(self.target.key, self.graph, round_to=self.round_to, latency=latency)
        self.dense = self.measure.dense(self.network)
        self.limit = self.target.limit(self.dense)

    def _check_possible(self) -> None:
        if self.limit >= self.dense:
            raise ConfigError(
                f"A target must be below the dense network's own figure, {self.target.figure(self.dense)}. "
                f"Got {self.target.figure(self.limit)}; train without a target instead."
            )
        widths = {site.name: torch.zeros(site.width) for site in self.graph.sites}
        smallest = CutSearch(widths, self.floors, self.round_to, self._cost, self.limit, self.lines)
        floor = smallest.cost(smallest.at_rank(0))
        if floor > self.limit:
            raise ConfigError(
                f"A target must be within reach: at least {self.target.figure(floor)} "
                f"({100 * floor / self.dense:.1f}%) stay if every site goes to its floor. Got "
                f"{self.target.figure(self.limit)}; softprune.inspect says what is frozen and why, and min_channels, "
                "round_to, include and exclude raise the floor."
            )

    # --- the training ------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether a decision is in force (reads the device)."""
        return bool(self.decision.in_force)

    def next_look(self, step: int) -> int | None:
        """The step after `step` behind which :meth:`look` is due; None if there is no more."""
        if step < self.settle_at:
            return min((step // self.every + 1) * self.every, self.settle_at)
        return self.total_steps if step < self.total_steps else None

    def look(self, step: int) -> float:
        """Take stock when `step` steps are done; returns the strength from here on.

        With several processes all must call it, and the first one's answer is everybody's: running statistics, and
        with them what folds, differ a little.
        """
        if step >= self.settle_at:
            self.settle(step=step)
            broadcast_from_rank0_(*(self._override(site.name).view(torch.uint8) for site in self.graph.sites))
            return 0.0
        if self.settled:
            self.decision.in_force.fill_(False)  # decided before its time, and training goes on
        fitter = self._fitter(self.network)
        self._near = fitter.rank(self._near, within=1 + len(fitter.row) // 200)
        margin = torch.tensor(
            _log_odds(fitter.edge(self._near)) - _log_odds(self._threshold()), dtype=torch.float64
        )
        margin = margin.to(self.decision.in_force.device)
        broadcast_from_rank0_(margin)
        if float(margin) <= 0 and step >= EARLIEST * self.total_steps:
            self.settle_at = step  # the target is met
            return self.look(step)
        strength = self.controller.update(step, float(margin))
        logger.debug("step %d: margin %.3f, strength %.3g", step, float(margin), strength)
        return strength

    @torch.no_grad()
    def settle(self, network: nn.Module | None = None, *, step: int | None = None) -> None:
        """Put the cut that fits into force, or make sure that the one in force still fits.

        What a constant folds into depends on the weights, so a cut's cost may change, if rarely, while they go on
        learning.
        """
        network = network or self.network
        before = self._decision() if self.settled else None
        fitter = self._fitter(network, before)
        if before is None:
            cut = fitter.fit()
        else:
            counts = tuple(int(mask.sum()) for mask in before.values())
            cut = Cut(counts, fitter.cost(counts))
            if cut.cost <= self.limit and (step is None or cut.cost >= (1 - CLOSE) * self.limit):
                return  # only a look, which training follows or ends with, makes use of what is left
            cut = fitter.refine(cut)
        masks = fitter.masks(cut.counts)
        alive = 0 if before is not None else self._alive_outside(network, masks)
        for name, mask in masks.items():
            self._override(name).copy_(mask)
        self.decision.in_force.fill_(True)
        self._report(cut, step, alive)

    @contextmanager
    def on_trial(self, step: int, *, of_a_copy: bool = False) -> Iterator[None]:
        """What is settled inside before its time, at step `step`, or of a copy, whose weights may fold differently, is
        undone behind: the training is left as it was."""
        if step >= self.settle_at and not of_a_copy:
            yield
            return
        decision, in_force = self._decision(), self.settled
        try:
            yield
        finally:
            for name, mask in decision.items():
                self._override(name).copy_(mask)
            self.decision.in_force.fill_(in_force)

    def _alive_outside(self, network: nn.Module, masks: Mapping[str, Tensor]) -> int:
        """Channels that go although SCP itself would keep them."""
        count = 0
        for name, mask in masks.items():
            bn = network.get_submodule(name)
            assert isinstance(bn, _BatchNorm)
            count += int((~self._gate(name).dead(bn) & ~mask.to(bn.weight.device)).sum())
        return count

    def _report(self, cut: Cut, step: int | None, alive: int) -> None:
        figure = self.target.figure
        logger.info(
            "settled%s on %s of %s (%.2f%%), limit %s",
            "" if step is None else f" after step {step}",
            figure(cut.cost),
            figure(self.dense),
            100 * cut.cost / self.dense,
            figure(self.limit),
        )
        width = sum(site.width for site in self.graph.sites)
        if alive > MANY_ALIVE * width:
            logger.warning(
                "of the channels that go %d are alive, %.0f%% of all: the training was too short or too gentle for "
                "this target, and the network has little time left to get over the loss. Give it more steps, a larger "
                "learning rate (rather SGD's, as in the paper, than Adam's), or a larger target",
                alive,
                100 * alive / width,
            )
        if cut.cost > self.limit:
            logger.warning(
                "no cut fits: %s stay at least, over the limit of %s", figure(cut.cost), figure(self.limit)
            )
        elif cut.cost < (1 - CLOSE) * self.limit:
            logger.warning(
                "the nearest cut found leaves %s, more than %g%% under the limit of %s: single channels%s are that big",
                figure(cut.cost),
                100 * CLOSE,
                figure(self.limit),
                "" if self.round_to == 1 else f", kept in multiples of {self.round_to},",
            )

    @torch.no_grad()
    def impose(self, copy: nn.Module) -> None:
        """Let a copy of the network (an EMA, say) evaluate with the decision in force here, if its gates are ours."""
        for site in self.graph.sites:
            gate = getattr(copy.get_submodule(site.name), "gate", None)
            if isinstance(gate, SoftGate) and gate.override is not None and gate.decision is not None:
                gate.override.copy_(self._override(site.name))
                gate.decision.in_force.copy_(self.decision.in_force)

    # --- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume exactly."""
        return {
            "key": self.target.key,
            "limit": self.limit,
            "total_steps": self.total_steps,
            "controller": self.controller.state_dict(),
            "near": self._near,
            "settle_at": self.settle_at,
            "settled": self.settled,
            "decision": {name: mask.cpu() for name, mask in self._decision().items()},
            # What is measured comes out a little different each time.
            "latency": None if self.latency is None else self.latency.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, in place."""
        self.check_state(state)
        if self.latency is not None and state.get("latency") is not None:
            self._use(LatencyTable.from_dict(state["latency"]))
        self._check_same(state, "limit", self.limit)
        self.controller.load_state_dict(state["controller"])
        self._near, self.settle_at = state["near"], state.get("settle_at", self._latest())
        for name, mask in state["decision"].items():
            self._override(name).copy_(mask)
        self.decision.in_force.fill_(state["settled"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise unless a state is of this target and length of training."""
        self._check_same(state, "key", self.target.key)
        self._check_same(state, "total_steps", self.total_steps)
        if self.latency is None:
            self._check_same(state, "limit", self.limit)

    # --- inside ------------------------------------------------------------------------------------------------

    def _check_same(self, state: dict[str, Any], key: str, value: object) -> None:
        if state.get(key) != value:
            raise CheckpointError(
                f"a budget's state must be of the same target and length of training. Its {key!r} is {value!r}; got "
                f"{state.get(key)!r}. Make the pruner as that of the checkpoint was made."
            )

    def _latest(self) -> int:
        """The step behind which the decision is settled in any case."""
        return self.total_steps - max(
            round(SETTLE * self.total_steps), min(SETTLE_STEPS, self.total_steps // 2)
        )

    def _gate(self, name: str) -> SoftGate:
        bn = self.network.get_submodule(name)
        assert isinstance(bn, MaskedBatchNorm)
        assert isinstance(bn.gate, SoftGate)
        return bn.gate

    def _override(self, name: str) -> Tensor:
        override = self._gate(name).override
        assert override is not None
        return override

    def _decision(self) -> dict[str, Tensor]:
        return {site.name: self._override(site.name).clone() for site in self.graph.sites}

    def _threshold(self) -> float:
        """The probability of being alive below which SCP drops a channel."""
        return 1 - self._gate(self.graph.sites[0].name).config.c

    def _cost(self, masks: Mapping[str, Tensor]) -> float:
        return self.measure(self.network, masks)

    @torch.no_grad()
    def _fitter(self, network: nn.Module, first: Mapping[str, Tensor] | None = None) -> CutSearch:
        """The channels of `network` in a row by how likely they are alive, those in `first` before the others."""
        alive = {}
        for site in self.graph.sites:
            gate, bn = self._gate(site.name), network.get_submodule(site.name)
            assert isinstance(bn, _BatchNorm)
            # In float64 even channels 38 standard deviations below the threshold have their order.
            shift, scale = bn.bias.double(), bn.weight.double()
            alive[site.name] = alive_probability(shift, scale, gate.config, gate.activation)
            if first is not None:
                alive[site.name] += first[site.name]
        return CutSearch(
            alive,
            self.floors,
            self.round_to,
            lambda masks: self.measure(network, masks),
            self.limit,
            self.lines,
        )


def _log_odds(probability: float) -> float:
    probability = min(max(probability, 1e-300), 1 - 1e-12)
    return math.log(probability) - math.log1p(-probability)
