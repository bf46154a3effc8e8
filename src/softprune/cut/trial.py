"""Trial cuts of a copy of the network before training: freeze sites that cannot be cut exactly.

``x.view(b, 2, c // 2, h, w)`` and ``x.view(b, 2, 58, h, w)`` look the same to torch.export, and no set of rules covers
all ways to write a forward(). A float64 copy is therefore cut with several sets of random masks and with all sites at
their floors, and compared with the masked copy, so that a network that cannot be cut fails before training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.cut.analyses import floor_masks, required_sites
from softprune.cut.apply import cut_, plain_copy
from softprune.cut.plan import make_plan
from softprune.cut.verify import (
    by_sample,
    compare,
    first_taken,
    noise,
    one_thread,
    outputs_and_foreign,
    outputs_of,
    smallest,
)
from softprune.errors import ModelError, few_of, first_line
from softprune.graph import ChannelGraph, Example
from softprune.graph.channels import UnprovenSize
from softprune.log import get_logger
from softprune.masks import mask_sites_, unmask_model_
from softprune.module_state import attributes_kept

logger = get_logger(__name__)

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Tolerance relative to the largest output. The outputs of a wrong cut differ by about their own scale."""
NONDETERMINISTIC = {"cpu": 1e-6, "cuda": 1e-5}
"""Tolerance between two calls of the same network, by device: a GPU may sum in a different order."""
FEW = 0.4
"""Share of the channels that the second mask set of a trial keeps, chosen at random."""
NEAR_ZERO = 1e-2
"""Parameters with all values below this are perturbed, since the layers before them would not affect the outputs."""

Suspect = str | tuple[UnprovenSize, ...]
"""A site that it may be impossible to cut, or the explicit sizes in one code location."""


@one_thread()
def trial_cut(graph: ChannelGraph, model: nn.Module) -> ChannelGraph:
    """Return `graph` with all sites frozen that cannot be cut exactly in a trial."""
    if not graph.sites or any(parameter.is_meta for parameter in model.parameters()):
        return graph
    trial = _Trial(graph, model)
    if trial.failure(graph) is None:
        return graph
    still = replace(graph, attributes_follow=False)  # an integer may repeat a width by accident
    if trial.failure(still) is None:
        return still
    by_code: dict[str, list[UnprovenSize]] = {}
    for size in graph.unproven_sizes:
        by_code.setdefault(size.code, []).append(size)
    codes = [tuple(sizes) for sizes in by_code.values()]
    # Test sites before sizes, and first the sizes on which the most sites depend.
    codes.sort(key=lambda sizes: len(_frozen(graph, {sizes: ""}).sites))
    suspects: list[Suspect] = [*(site.name for site in graph.sites), *codes]
    misread = trial.failure(_frozen(graph, dict.fromkeys(suspects, "")))
    if misread is not None:
        reason = f"softprune misreads this network: its cut failed without any masks ({misread}); please report it"
        logger.warning("softprune: %s: %s", type(model).__name__, reason)
        return graph.freeze(np.arange(len(graph.classes)), reason)
    return _frozen(graph, _causes(trial, graph, suspects, {}))


def _causes(
    trial: _Trial, graph: ChannelGraph, suspects: Sequence[Suspect], frozen: dict[Suspect, str]
) -> dict[Suspect, str]:
    """Find by bisection which `suspects` cannot be cut, given those that are `frozen`; return them with reasons.

    If all suspects are frozen, the cut is exact.
    """
    failure = trial.failure(_frozen(graph, frozen))
    if failure is None:
        return {}
    if len(suspects) == 1:
        return {suspects[0]: failure}
    first, second = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    causes = _causes(trial, graph, first, frozen | dict.fromkeys(second, ""))
    return causes | _causes(trial, graph, second, frozen | causes)


def _frozen(graph: ChannelGraph, suspects: dict[Suspect, str]) -> ChannelGraph:
    """Return `graph` with these sites frozen, and with those whose number of channels is fixed by these sizes."""
    for suspect in suspects:
        for size in () if isinstance(suspect, str) else suspect:
            graph = graph.freeze(size.atoms, f"its channels cannot be cut: {size.reason}")
    sites = {site.name for site in graph.sites}
    return graph.only({s: f"a trial cut of it failed ({why})" for s, why in suspects.items() if s in sites})  # type: ignore[misc]


@contextmanager
def masks_on(model: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """Apply fixed masks to the BatchNorms of a plain model; remove them on exit."""
    mask_sites_(model, masks)
    try:
        yield
    finally:
        unmask_model_(model)


class _Trial:
    """A copy of the network with perturbed BatchNorms and zero parameters, so that every channel has an effect.

    It has been run in training mode, since networks may create caches and buffers then.
    """

    def __init__(self, graph: ChannelGraph, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        # Drop more of the last channels, so that a slice by a share of the width covers other channels after the cut.
        masks = {s.name: torch.rand(s.width, generator=generator) < torch.linspace(1, 0, s.width) for s in graph.sites}
        # With the first masks, a piece that must be as wide as others may be kept whole, and no width would change.
        few = {s.name: torch.rand(s.width, generator=generator) < FEW for s in graph.sites}
        required = required_sites(graph)
        few = {name: mask if mask.any() or name not in required else ~mask for name, mask in few.items()}
        self._mask_sets = [masks, few, floor_masks(graph)]
        self._copy = plain_copy(model).eval()
        _perturb_(self._copy, generator)
        masks = graph.member_masks(masks)
        self._copy, self._input, outputs = first_taken(self._attempts(graph.example, masks))
        self._check_equal(outputs, masks, model)
        unmask_model_(self._copy)
        self._tolerance = TOLERANCES[next(p.dtype for p in self._copy.parameters() if p.is_floating_point())]
        self._training = self._training_shapes()

    def failure(self, graph: ChannelGraph) -> str | None:
        """Return why a cut of all sites of `graph` is not exact; None if it is."""
        for number, masks in enumerate(self._mask_sets):
            failure = self._failure(graph, {site.name: masks[site.name] for site in graph.sites})
            if failure is not None:
                self._mask_sets.insert(0, self._mask_sets.pop(number))  # the most likely to fail next time
                return failure
        return None

    def _failure(self, graph: ChannelGraph, masks: dict[str, Tensor]) -> str | None:
        with masks_on(self._copy, graph.member_masks(masks)):
            expected = outputs_of(self._copy, self._input)
        plan = make_plan(graph, self._copy, masks)
        with attributes_kept(self._copy):  # a new copy for every cut would double the time
            cut_(plan, self._copy)
            try:
                got = outputs_of(self._copy, self._input)
                # Auxiliary heads, and buffers with the shape of features, only matter in training mode.
                training = None if self._training is None else self._training_shapes(fails=True)
            except Exception as error:  # forward() may raise anything
                logger.debug("the trial cut failed", exc_info=True)
                return f"{type(error).__name__}: {first_line(error)}"
        if training != self._training:
            return f"in training mode the outputs have shapes {training} instead of {self._training}"
        difference, scale = compare(by_sample(expected, self._input), by_sample(got, self._input))
        return None if difference <= self._tolerance * scale else _described(difference, scale)

    def _attempts(self, given: Example, masks: dict[str, Tensor]) -> Iterator[tuple[nn.Module, Example]]:
        """Yield masked copies in float64 and float32, each with a small and the given input, in order of preference."""
        own = self._copy
        for self._convert_ in (nn.Module.double, nn.Module.float):
            copy = self._convert_(plain_copy(own))
            mask_sites_(copy, masks)
            example = given.to_model(copy)
            yield copy, noise(example if example.batch_size() is None else example.with_batch(2), 0, smallest)
            yield copy, example

    def _check_equal(self, outputs: list[Tensor], masks: dict[str, Tensor], model: nn.Module) -> None:
        """Raise a ModelError unless another copy gives the same `outputs` without reading parameters of `model`."""
        name, twin = type(self._copy).__name__, self._convert_(plain_copy(self._copy, share=True))
        foreign: list[str] = []
        mask_sites_(twin, masks)
        try:
            others, foreign = outputs_and_foreign(twin, self._input, model)
            difference, scale = compare(outputs, others)
            shown = _described(difference, scale)
        except Exception as error:
            difference, scale, shown = math.inf, 1.0, f"{type(error).__name__}: {first_line(error)}"
        if foreign:
            raise ModelError(
                f"a copy of a network must compute with its own parameters. A copy of this {name} reads "
                f"{few_of('', foreign)} of the original: its forward() calls a function that references the original "
                "modules, such as `model.forward = lambda x: ...` or a lambda stored on a module. Write it as a method "
                "of a module instead."
            )
        if difference <= NONDETERMINISTIC.get(outputs[0].device.type, 1e-5) * scale:
            return
        raise ModelError(
            "a network and its copy must give the same outputs for the same input in eval mode. Two copies of this "
            f"{name} differed: {shown}. Remove randomness from forward() in eval mode, and make sure that "
            "copy.deepcopy copies everything that forward() depends on."
        )

    def _training_shapes(self, *, fails: bool = False) -> list[tuple[int, ...]] | None:
        """Return the shapes of the outputs in training mode; None if it fails, for example without targets.

        With `fails`, the error is raised if the network ran in training mode before.
        """
        cuda = [parameter.device for parameter in self._copy.parameters() if parameter.is_cuda][:1]
        try:
            with torch.random.fork_rng(devices=cuda):
                return [tuple(output.shape) for output in outputs_of(self._copy.train(), self._input)]
        except Exception:
            if fails:
                raise
            return None
        finally:
            self._copy.eval()


def _perturb_(model: nn.Module, generator: torch.Generator) -> None:
    """Add noise to all BatchNorms, and to parameters that are (nearly) zero, such as a new layer scale."""

    def perturb_(tensor: Tensor | None) -> None:
        if tensor is not None:
            change = 0.3 * torch.randn(tensor.shape, generator=generator)
            tensor.data = tensor.data + change.to(tensor.device, tensor.dtype)

    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in norms:
        for tensor in (module.weight, module.bias, module.running_mean):
            perturb_(tensor)
    own = {id(parameter) for module in norms for parameter in module.parameters()}
    for parameter in model.parameters():
        is_weight = id(parameter) not in own and parameter.is_floating_point() and parameter.numel()
        # For speed, test the first 1,024 values before all of them.
        parts = (parameter.detach().reshape(-1)[:1024], parameter.detach()) if is_weight else ()
        if parts and all(float(part.abs().max()) < NEAR_ZERO for part in parts):
            perturb_(parameter)


def _described(difference: float, scale: float) -> str:
    return f"outputs of scale {scale:.2g} were off by {difference:.2g}"
