"""Cut a copy of the network with random masks, and compare it with the masked copy on a small random input."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.cut.apply import cut_, plain_copy
from softprune.cut.build import make_plan
from softprune.cut.comparison import by_sample, compare, noise, outputs_and_foreign, quick_outputs_of, smallest
from softprune.cut.coupling import required_sites
from softprune.cut.verify import mask_sites_, masks_on
from softprune.errors import ModelError, few_of, first_line
from softprune.graph import ChannelGraph, Example
from softprune.log import get_logger
from softprune.module_state import attributes_kept, state_kept

logger = get_logger(__name__)

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Relative to the largest output. A wrong cut differs by about the size of the outputs themselves; a difference in
float32 is checked again in float64."""
NONDETERMINISTIC = {"cpu": 1e-6, "cuda": 1e-5}
"""The tolerance between two calls of one network, by device: a GPU may sum in another order."""
UNTRAINABLE: list[tuple[int, ...]] = [(-1,)]
"""The shapes of a network that does not run in training mode on the example, for example since it needs targets."""
NEAR_ZERO = 1e-2
"""Parameters below this everywhere are perturbed: what follows them would reach no output."""


def site_names(graph: ChannelGraph, left_out: Sequence[str] = ()) -> list[str]:
    """Return the names of the sites, without those `left_out`."""
    return [site.name for site in graph.sites if site.name not in left_out]


class Probe:
    """A copy of the network whose BatchNorms and zero parameters are perturbed, so that every channel has an effect."""

    def __init__(self, graph: ChannelGraph, model: nn.Module) -> None:
        self.network = type(model).__name__
        self._copy = plain_copy(model).eval()
        if self._dtype() not in TOLERANCES:
            self._copy.float()
        generator = torch.Generator().manual_seed(0)
        _perturb_(self._copy, generator)
        required = required_sites(graph)
        # With one half alone, what forward() finds at a share of the width is not what it found before the cut.
        self._mask_sets = (
            _random_masks(graph, generator),
            {site.name: torch.arange(site.width) < (site.width + 1) // 2 for site in graph.sites},
            _last_half_masks(graph, required, generator),
            # All that can be dropped, which changes every size that forward() could have fixed.
            {site.name: torch.arange(site.width) >= site.width - (site.name in required) for site in graph.sites},
        )
        self._failed: list[int] = []
        """The mask sets that have failed; in search of the causes, the others are left out."""
        self._tried: dict[tuple[bytes, int, Set[str]], str | None] = {}
        """Pinned classes, mask set and masked sites -> why their cut failed."""
        self._widest = self._dtype() is torch.float64
        self._training: list[tuple[int, ...]] | None = None
        self._first_masks = graph.member_masks(self._mask_sets[0])
        with masks_on(self._copy, self._first_masks):
            self._input, self._first_outputs, foreign = self._accepted(graph.example.to_model(self._copy), model)
        if foreign:
            raise ModelError(
                "a copy of a network must compute with its own parameters. A copy of this "
                f"{self.network} reads {few_of('', foreign)} of the original: its forward() calls a function "
                "that keeps the original's modules, such as `model.forward = lambda x: ...` or a lambda stored on a "
                "module. Write it as a method of a module instead."
            )

    def call_copy(self, graph: ChannelGraph) -> dict[str, str]:
        """Call a copy of the network with the same input and masks; raise a ModelError if its outputs differ.

        Return the sites whose module is never called, so that a mask would have no effect, with the reason.
        """
        twin = plain_copy(self._copy, share=True)
        mask_sites_(twin, self._first_masks)
        called: set[str] = set()
        norms = [name for site in graph.sites for name in site.members]
        for name in norms:
            twin.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: called.add(name))
        self._check_equal(twin)
        if len(called) < len(norms):  # auxiliary heads run in training alone
            self._training_shapes(twin)
        reason = "forward() never calls the module but applies its tensors (F.batch_norm), so that a mask has no effect"
        return {site.name: reason for site in graph.sites if not called.issuperset(site.members)}

    def _check_equal(self, twin: nn.Module) -> None:
        """Raise unless `twin`, a copy, gives the outputs that the first call gave."""
        try:
            difference, scale = compare(self._first_outputs, quick_outputs_of(twin, self._input))
            shown = _described(difference, scale)
        except Exception as error:
            difference, scale, shown = math.inf, 1.0, _shown(error)
        device = next(self._copy.parameters()).device.type
        if difference <= NONDETERMINISTIC.get(device, 1e-5) * scale:
            return
        again, scale = compare(self._first_outputs, self._masked_outputs(self._first_masks))
        # Randomness differs by about as much from call to call; rounding differs by far less than two networks.
        if again > 1e-2 * difference:
            raise ModelError(
                "a network must give the same outputs for the same input in eval mode. Two calls of this "
                f"{self.network} differed: {_described(again, scale)}. Remove the randomness from forward(), or let it "
                "draw in training mode only."
            )
        raise ModelError(
            "a copy of a network must give the same outputs as the network. Two copies of this "
            f"{self.network} differed: {shown}. Let copy.deepcopy copy all that its forward() depends on."
        )

    def finds_failure(self, graph: ChannelGraph) -> bool:
        """Cut all sites with all masks. Return whether masks failed that had not failed before, and note them."""
        chosen = frozenset(site_names(graph))
        new = (number for number in range(len(self._mask_sets)) if number not in self._failed)
        failed = next((number for number in new if self._failure(graph, number, chosen) is not None), None)
        self._failed += [] if failed is None else [failed]
        return failed is not None

    def failure(self, graph: ChannelGraph, names: Sequence[str] | None = None) -> str | None:
        """Describe why a cut (of the sites `names` alone) with masks that have failed is not exact; None if it is."""
        chosen = frozenset(site_names(graph) if names is None else names)
        failures = (self._failure(graph, number, chosen) for number in reversed(self._failed))
        return next((failure for failure in failures if failure is not None), None)

    def _failure(self, graph: ChannelGraph, number: int, chosen: frozenset[str]) -> str | None:
        trial = graph.pinned.tobytes(), number, chosen
        if trial not in self._tried:
            failure, rounding = self._try(graph, number, chosen)
            if rounding and self._use_float64():
                failure, _ = self._try(graph, number, chosen)
            self._tried[trial] = failure
        return self._tried[trial]

    def _try(self, graph: ChannelGraph, number: int, chosen: Set[str]) -> tuple[str | None, bool]:
        """Return why a cut is not exact, None if it is, and whether that may be due to rounding."""
        masks = {name: mask for name, mask in self._mask_sets[number].items() if name in chosen}
        members = graph.member_masks(masks)
        is_first = number == 0 and members.keys() == self._first_masks.keys()
        in_training = number in (0, len(self._mask_sets) - 1)
        if self._training is None:
            self._training = self._training_shapes(self._copy)
        try:
            plan = make_plan(graph, self._copy, masks)
            plan.check_fits(self._copy)
            with attributes_kept(self._copy):  # a copy for every cut would take as long as all the rest
                cut_(plan, self._copy)
                got = quick_outputs_of(self._copy, self._input)
                # Auxiliary heads, and buffers that follow features, show in training mode alone.
                if in_training and self._training != UNTRAINABLE:
                    with state_kept(self._copy):
                        self._copy.train()
                        shapes = _output_shapes(self._copy, self._input)
                    if shapes != self._training:
                        raise ModelError(f"in training mode outputs became {shapes}, and were {self._training}")
        except Exception as error:
            logger.debug("the trial cut failed", exc_info=True)
            return _shown(error), False
        failure = self._difference(self._first_outputs if is_first else self._masked_outputs(members), got)
        return failure, failure is not None

    def _use_float64(self) -> bool:
        """Continue in float64, where no failure is due to rounding. Return whether it is new, and the network runs."""
        if self._widest:
            return False
        self._widest = True
        wide = plain_copy(self._copy, nn.Module.double)
        example = self._input.to_model(wide)
        with contextlib.suppress(Exception), masks_on(wide, self._first_masks):
            self._first_outputs = quick_outputs_of(wide, example)
            self._copy, self._input = wide, example
            return True
        return False

    def _difference(self, expected: Sequence[Tensor], got: Sequence[Tensor]) -> str | None:
        difference, scale = compare(by_sample(expected, self._input), by_sample(got, self._input))
        tolerance = TOLERANCES[self._dtype()]
        return None if difference <= tolerance * scale else _described(difference, scale)

    def _accepted(self, given: Example, model: nn.Module) -> tuple[Example, list[Tensor], list[str]]:
        """Return a small random input, or the example if the network takes no other; outputs; parameters of `model`
        that were read."""
        quick = noise(given if given.batch_size() is None else given.with_batch(2), 0, smallest)
        for attempt in (quick, given):
            try:
                return attempt, *outputs_and_foreign(self._copy, attempt, model)
            except Exception as error:
                failure = error
        raise ModelError(
            f"the model must accept `example`. Got {type(failure).__name__} from {type(self._copy).__name__} in eval "
            f"mode: {failure}. Pass an example that model(example) accepts."
        ) from failure

    def _dtype(self) -> torch.dtype:
        return next(each.dtype for each in self._copy.parameters() if each.is_floating_point())

    def _masked_outputs(self, masks: dict[str, Tensor]) -> list[Tensor]:
        with masks_on(self._copy, masks):
            return quick_outputs_of(self._copy, self._input)

    def _training_shapes(self, model: nn.Module) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs of `model` in training mode."""
        with contextlib.suppress(Exception), state_kept(model):
            model.train()
            return _output_shapes(model, self._input)
        return UNTRAINABLE


def _perturb_(model: nn.Module, generator: torch.Generator) -> None:
    """Add noise to every BatchNorm, and to parameters that are zero, such as a layer scale at its start."""

    def perturb_(tensor: Tensor | None) -> None:
        if tensor is not None:
            change = 0.3 * torch.randn(tensor.shape, generator=generator)
            tensor.add_(change.to(tensor.device, tensor.dtype))

    with torch.no_grad():
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for module in norms:
            for tensor in (module.weight, module.bias, module.running_mean):
                perturb_(tensor)
        own = {id(parameter) for module in norms for parameter in module.parameters()}
        for parameter in model.parameters():
            is_weight = id(parameter) not in own and parameter.is_floating_point() and parameter.numel()
            # A few values mostly decide, and large networks have many.
            parts = (parameter.reshape(-1)[:1024], parameter) if is_weight else ()
            if parts and all(float(part.abs().max()) < NEAR_ZERO for part in parts):
                perturb_(parameter)


def _output_shapes(model: nn.Module, example: Example) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors that one call of `model` returns, and restore the random state."""
    cuda = [parameter.device for parameter in model.parameters() if parameter.is_cuda][:1]
    with torch.random.fork_rng(devices=cuda):
        return [tuple(tensor.shape) for tensor in quick_outputs_of(model, example)]


def _described(difference: float, scale: float) -> str:
    return f"outputs of scale {scale:.2g} were off by {difference:.2g}"


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _random_masks(graph: ChannelGraph, generator: torch.Generator) -> dict[str, Tensor]:
    """Return masks that drop about half of every site at random."""
    masks = {}
    for site in graph.sites:
        mask = torch.rand(site.width, generator=generator) < 0.5
        mask[0] |= not mask.any()
        masks[site.name] = mask
    return masks


def _last_half_masks(graph: ChannelGraph, required: frozenset[str], generator: torch.Generator) -> dict[str, Tensor]:
    """Return masks that drop the first half of every site, and all of some that may die."""
    masks = {}
    for site in graph.sites:
        dies = float(torch.rand((), generator=generator)) < 0.1 and site.name not in required
        masks[site.name] = (torch.arange(site.width) >= site.width // 2) & (not dies)
    return masks
