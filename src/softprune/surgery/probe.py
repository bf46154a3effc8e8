"""A trial cut before anything relies on the analysis: what does not come out equal is frozen, with the reason.

``x.view(b, 2, c // 2, h, w)`` and ``x.view(b, 2, 58, h, w)`` look the same to torch.export, and no rule knows every
way to write a forward(). So every network is cut once with random masks, and compared with itself on a small random
input: before a GPU-hour is spent, not after.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.errors import ModelError, first_line
from softprune.graph import ChannelGraph, Example
from softprune.graph.ops import UnprovenSize
from softprune.masks.model import unmask_model_
from softprune.plan import make_plan, required_sites
from softprune.surgery.apply import apply_plan, plain_copy
from softprune.surgery.inputs import noise, smallest
from softprune.surgery.quick import one_thread, without_onednn
from softprune.surgery.verify import compare, mask_sites_, outputs_of

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-8}
"""Relative to the largest output. A wrong cut is off by the size of the outputs themselves."""
UNTRAINABLE: list[tuple[int, ...]] = [(-1,)]
"""For networks that do not run in training mode on the example (they want targets, say)."""
WAVERING = 1e-5
"""The same, between two calls: what sums in another order may cost on a GPU."""


def prove(graph: ChannelGraph, model: nn.Module) -> ChannelGraph:
    """`graph` with what a trial cut shows to be bound frozen."""
    if not graph.sites or any(parameter.is_meta for parameter in model.parameters()):
        return graph
    with one_thread(), without_onednn():
        return _prove(graph, model)


def _prove(graph: ChannelGraph, model: nn.Module) -> ChannelGraph:
    trial = _Trial(graph, model)
    apart = trial.wavering()
    if apart is not None:
        raise ModelError(
            "a network must give the same outputs for the same input in eval mode. Two calls of this "
            f"{type(model).__name__} differed: {apart}. Take the randomness out of its forward()."
        )
    if trial.failure(graph) is None:
        return graph
    apart = trial.copies_apart()
    if apart is not None:
        raise ModelError(
            "a copy of a network must give the same outputs as the network. Two copies of this "
            f"{type(model).__name__} differed: {apart}. Let copy.deepcopy take all that its forward() depends on."
        )
    trial.widen()  # from here on nothing is blamed on rounding
    misread = trial.failure(graph, [])
    if misread is not None:
        reason = f"softprune misreads this network: with nothing masked its cut failed ({misread}); please report it"
        logger.warning("%s: %s", type(model).__name__, reason)
        return graph.freeze(np.arange(len(graph.classes)), reason)
    graph = _without_literals(trial, graph)
    blame = _blame(trial, graph, [site.name for site in graph.sites])
    return graph.only({name: f"a trial cut of it failed ({reason})" for name, reason in blame.items()})


def _without_literals(trial: _Trial, graph: ChannelGraph) -> ChannelGraph:
    """Freeze the suspects whose sizes turn out to be literals, each tried with all others frozen."""
    proved = graph
    groups = _connected(graph)
    for group in groups:
        others = proved
        for suspect in graph.unproven_sizes:
            others = others if suspect in group else others.freeze(suspect.atoms, "")
        if trial.failure(others) is None:
            continue
        for suspect in group:
            logger.info("sizes in %s are literals: its channels are frozen", suspect.place)
            reason = f"its channels cannot be cut: {suspect.place} fixes their number by a literal size"
            proved = proved.freeze(suspect.atoms, reason)
    return proved


def _connected(graph: ChannelGraph) -> list[list[UnprovenSize]]:
    """Suspects that can only be tried together: those of one line of the source, and those with channels in common."""
    groups: list[tuple[set[object], list[UnprovenSize]]] = []
    for suspect in graph.unproven_sizes:
        marks: set[object] = {suspect.line, *graph.classes[suspect.atoms].tolist()}
        members = [suspect]
        for group in [group for group in groups if not group[0].isdisjoint(marks)]:
            groups.remove(group)
            marks, members = marks | group[0], group[1] + members
        groups.append((marks, members))
    return [members for _, members in groups]


def _blame(trial: _Trial, graph: ChannelGraph, names: Sequence[str]) -> dict[str, str]:
    """The sites among `names` that cannot be cut -> why, by halving."""
    failure = trial.failure(graph, names)
    if failure is None:
        return {}
    if len(names) == 1:
        return {names[0]: failure}
    half = len(names) // 2
    blame = {**_blame(trial, graph, names[:half]), **_blame(trial, graph, names[half:])}
    rest = [name for name in names if name not in blame]
    together = trial.failure(graph, rest)
    return blame if together is None else dict.fromkeys(names, together)


class _Trial:
    """A copy of the network with shifts and statistics stirred, so that no constant is zero by accident."""

    def __init__(self, graph: ChannelGraph, model: nn.Module) -> None:
        self._twin = plain_copy(model).eval()
        if next(self._twin.parameters()).dtype not in TOLERANCES:
            self._twin.float()
        generator = torch.Generator().manual_seed(0)

        def stir(tensor: Tensor | None) -> None:
            if tensor is not None:
                change = 0.3 * torch.randn(tensor.shape, generator=generator)
                tensor.add_(change.to(tensor.device, tensor.dtype))

        with torch.no_grad():
            for module in self._twin.modules():
                if isinstance(module, _BatchNorm):
                    stir(module.bias)
                    stir(module.running_mean)
        required = required_sites(graph)
        self._mask_sets = (_half(graph, required, generator), _least(graph, required))
        self._input = self._accepted(graph.example.to_model(self._twin))
        self._in_training: list[tuple[int, ...]] | None = None

    def wavering(self) -> str | None:
        """By how much two calls with the same input differ, in words; None where it is at most rounding."""
        difference, scale = compare(outputs_of(self._twin, self._input), outputs_of(self._twin, self._input))
        return None if difference <= WAVERING * scale else _off(difference, scale)

    def copies_apart(self) -> str | None:
        """How a bare copy differs, in words; None where it is by rounding at most."""
        expected = outputs_of(self._twin, self._input)
        try:
            return self._apart(expected, outputs_of(plain_copy(self._twin), self._input))
        except Exception as error:
            return _said(error)

    def widen(self) -> None:
        """Go on in float64, if the network runs in it."""
        twin = plain_copy(self._twin).double()
        wide = self._input.to_model(twin)
        with contextlib.suppress(Exception):
            outputs_of(twin, wide)
            self._twin, self._input = twin, wide

    def failure(self, graph: ChannelGraph, names: Sequence[str] | None = None) -> str | None:
        """Why a cut by trial masks (of the sites `names` alone) is not exact; None if it is."""
        chosen = {site.name for site in graph.sites} if names is None else set(names)
        for masks in self._mask_sets:
            failure = self._failure(graph, {name: mask for name, mask in masks.items() if name in chosen})
            if failure is not None:
                return failure
        return None

    def _failure(self, graph: ChannelGraph, masks: dict[str, Tensor]) -> str | None:
        expected = self._masked_outputs(masks)
        try:
            cut = apply_plan(make_plan(graph, self._twin, masks), self._twin)
            got = outputs_of(cut, self._input)
            self._check_training(cut)
        except Exception as error:
            logger.debug("the trial cut failed", exc_info=True)
            return _said(error)
        return self._apart(expected, got)

    def _apart(self, expected: Sequence[Tensor], got: Sequence[Tensor]) -> str | None:
        difference, scale = compare(expected, got)
        tolerance = TOLERANCES[next(self._twin.parameters()).dtype]
        return None if difference <= tolerance * scale else _off(difference, scale)

    def _accepted(self, given: Example) -> Example:
        """A small random input; the example itself where the network takes no other."""
        quick = noise(given if given.batch_size() is None else given.with_batch(2), 0, smallest)
        for attempt in (quick, given):
            try:
                outputs_of(self._twin, attempt)
            except Exception as error:
                failure = error
            else:
                return attempt
        raise ModelError(
            f"the model must accept `example`. Got {type(failure).__name__} from {type(self._twin).__name__} in eval "
            f"mode: {failure}. Pass an example that model(example) accepts."
        ) from failure

    def _masked_outputs(self, masks: dict[str, Tensor]) -> list[Tensor]:
        mask_sites_(self._twin, masks)
        try:
            return outputs_of(self._twin, self._input)
        finally:
            unmask_model_(self._twin)

    def _check_training(self, cut: nn.Module) -> None:
        """What only training runs must fit as well: auxiliary heads, buffers that follow features, literal sizes."""
        if self._in_training is None:
            self._in_training = self._training_shapes(self._twin)
        if self._in_training != UNTRAINABLE:
            shapes = _shapes_of(cut.train(), self._input)
            if shapes != self._in_training:
                raise ModelError(f"in training mode outputs became {shapes}, and were {self._in_training}")

    def _training_shapes(self, twin: nn.Module) -> list[tuple[int, ...]]:
        """Of the outputs in training mode; `twin` is left as it was."""
        before = [(buffer, buffer.clone()) for buffer in twin.buffers()]
        twin.train()
        try:
            return _shapes_of(twin, self._input)
        except Exception:
            return UNTRAINABLE
        finally:
            twin.eval()
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)


def _shapes_of(model: nn.Module, example: Example) -> list[tuple[int, ...]]:
    """Shapes of all tensors that one call of `model` returns; random numbers that it draws are given back."""
    cuda = [parameter.device for parameter in model.parameters() if parameter.is_cuda][:1]
    with torch.random.fork_rng(devices=cuda):
        return [tuple(tensor.shape) for tensor in outputs_of(model, example)]


def _off(difference: float, scale: float) -> str:
    return f"outputs of scale {scale:.2g} were off by {difference:.2g}"


def _said(error: Exception) -> str:
    """The error and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error)}"


def _half(graph: ChannelGraph, required: frozenset[str], generator: torch.Generator) -> dict[str, Tensor]:
    """Random masks that drop half of every site, and all of some that may die."""
    masks = {}
    for site in graph.sites:
        mask = torch.rand(site.width, generator=generator) < 0.5
        dies = float(torch.rand((), generator=generator)) < 0.1 and site.name not in required
        if not mask.any():
            mask[0] = True
        masks[site.name] = mask & (not dies)
    return masks


def _least(graph: ChannelGraph, required: frozenset[str]) -> dict[str, Tensor]:
    """Masks that drop all there is to drop, and so touch every size that forward() could have fixed."""
    return {
        site.name: torch.arange(site.width) >= site.width - (site.name in required) for site in graph.sites
    }
