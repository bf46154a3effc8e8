"""Count MACs, activations and parameters of any model, on the operators that its forward pass runs."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from softprune.errors import ModelError, first_line
from softprune.graph import check_is_module
from softprune.graph.reader import (
    ANALYSIS_BATCH,
    Constants,
    Example,
    ExampleLike,
    calls_noted,
    per_sample,
    without_data,
)
from softprune.log import get_logger

logger = get_logger(__name__)

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """Cost of a module, without its submodules."""

    kind: str
    """Class name of the module."""
    macs: int = 0
    """MACs of convolutions and linear layers."""
    activations: int = 0
    """Number of elements written by convolutions and linear layers."""
    params: int = 0
    """Number of parameters. A tensor shared by several modules is counted in the first one only."""
    channels: int = 0
    """Number of channels of a BatchNorm, 0 for other modules."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a model, the sum over `by_module`. Prints as a table."""

    macs: int
    """MACs of convolutions and linear layers, per sample."""
    activations: int
    """Elements written by convolutions and linear layers, per sample: memory traffic, which often limits GPUs."""
    params: int
    """Number of parameters. Shared ones are counted once."""
    channels: int
    """Number of channels of all BatchNorms."""
    by_module: Mapping[str, ModuleCost] = field(repr=False)
    """Costs by name of the module, for all modules with parameters, MACs or BatchNorm channels of their own."""

    @property
    def flops(self) -> int:
        """Two FLOPs per MAC."""
        return 2 * self.macs

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("module", "kind", "MACs", "activations", "params", "channels")]
        rows += [(name or "(root)", part.kind, *_figures(part)) for name, part in self.by_module.items()]
        rows.append(("total", "", *_figures(self)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        # Align names to the left and numbers to the right.
        line = "  ".join(f"{{:{'<' if place < 2 else '>'}{width}}}" for place, width in enumerate(widths))
        heading, *parts, total = (line.format(*row) for row in rows)
        rule = "-" * len(heading)
        return "\n".join([heading, rule, *parts, rule, total])

    __repr__ = __str__  # for notebooks


def _figures(part: ModuleCost | Cost) -> tuple[str, ...]:
    return tuple(f"{value:,}" for value in (part.macs, part.activations, part.params, part.channels))


def cost(model: nn.Module, example: ExampleLike) -> Cost:
    """Count the cost of `model` per sample, in eval mode, on tensors without data. The model is not changed.

    Args:
        model: Any model.
        example: An input of the model: a tensor, a tuple of arguments, or ``(args, kwargs)``. If its tensors have
            different first dimensions, there is no batch, and the cost is that of the whole call.
    """
    check_is_module(model)
    params = _params_by_module(model)
    macs, written = _per_sample(model, Example.of(example).to_model(model))
    parts = {}
    for name, module in model.named_modules():
        channels = module.num_features if isinstance(module, _BatchNorm) else 0
        if macs[name] or params[name] or channels:
            parts[name] = ModuleCost(
                kind=type(module).__name__,
                macs=macs[name],
                activations=written[name],
                params=params[name],
                channels=channels,
            )
    return Cost(
        macs=macs.total(),
        activations=written.total(),
        params=params.total(),
        channels=sum(part.channels for part in parts.values()),
        by_module=parts,
    )


def _params_by_module(model: nn.Module) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():  # yields a shared parameter once, under its first name
        if nn.parameter.is_lazy(parameter):
            raise ModelError(
                "Costs need parameters of known shape. "
                f"Got {name!r}, an uninitialised parameter of a lazy module. Run the model once first."
            )
        counts[name.rpartition(".")[0]] += parameter.numel()
    return counts


def _per_sample(model: nn.Module, example: Example) -> tuple[Counter[str], Counter[str]]:
    """Count MACs and activations with one sample; if this fails, with a small batch; else with the example as given."""
    for batch in (1, ANALYSIS_BATCH) if example.batch_size() is not None else ():
        try:
            return _by_module(model, example.with_batch(batch))
        except ModelError:
            logger.debug("the model does not accept a batch of %d", batch, exc_info=True)
    return _by_module(model, example)


def _by_module(model: nn.Module, example: Example) -> tuple[Counter[str], Counter[str]]:
    """Return MACs and activations per sample, by name of the innermost module whose forward ran the operator."""
    try:
        with without_data(model, example) as (mode, fakes, call):
            for name, parameter in model.named_parameters():
                # With gradients every linear layer is a plain 2-D product. Without, ATen would batch some of them,
                # which looks like attention, and PyTorch's own attention would use a fused path.
                fakes[name].requires_grad_(parameter.is_floating_point())
            for module in model.modules():
                module.training = False
            counter = _MacCounter(Constants(mode), batch=example.batch_size() or 1)
            with torch.enable_grad(), mode, counter, calls_noted(counter.running, model):
                torch.func.functional_call(model, fakes, call.args, call.kwargs)
    except Exception as error:
        raise ModelError(
            "Costs are counted by running the forward pass on tensors that have shapes but no data. "
            f"Got {type(error).__name__}: {first_line(error)}. Check that the forward pass accepts the example and "
            "does not branch on values."
        ) from error
    return counter.macs, counter.written


class _MacCounter(TorchDispatchMode):
    """Accumulates MACs and activations per sample, by the running module."""

    def __init__(self, constants: Constants, batch: int) -> None:
        super().__init__()
        self._constants = constants
        self.batch = batch
        self.macs: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.running: list[tuple[str, str]] = [("", "")]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._constants.run(func, args, kwargs or {})
        formula = _FORMULAS.get(func)
        if formula is not None:
            positions, weights = formula(*args[:9], out=out)
            name = self.running[-1][1]
            self.macs[name] += per_sample(positions, self.batch) * weights
            self.written[name] += per_sample((out if isinstance(out, Tensor) else out[0]).numel(), self.batch)
        return out


def _convolution(x: Tensor, weight: Tensor, *rest: Any, out: Tensor) -> tuple[int, int]:
    # Every weight is used once per output position, or in a transposed convolution, once per input position.
    *_, transposed, _, groups = rest
    positions = (x if transposed else out).shape[2:]
    # Per-sample weights (CondConv) are groups of a single convolution, so the groups may include the batch.
    return x.shape[0] * math.prod(positions) * groups, weight.numel() // groups


def _product(*operands: Tensor, out: Tensor) -> tuple[int, int]:
    *_, left, right = operands  # preceded by a bias in addmm and addmv
    return math.prod(left.shape[:-1]), right.numel()


def _lstm_layer(x: Tensor, inward: Tensor, recurrent: Tensor, *rest: Any, out: Any) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), inward.numel() + recurrent.numel()


def _recurrent(x: Tensor, weights: Sequence[Tensor], *rest: Any, out: Any) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), sum(weight.numel() for weight in weights if weight.dim() > 1)


# Functions that return (uses per weight in the whole batch, number of weights). F.linear is decomposed into one of
# these operators. Batched products (bmm, attention) are not linear layers and have no entry.
_FORMULAS: dict[Any, Callable[..., tuple[int, int]]] = {
    aten.convolution.default: _convolution,
    aten.mm.default: _product,
    aten.mv.default: _product,
    aten.addmm.default: _product,
    aten.addmv.default: _product,
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten._cudnn_rnn.default: _recurrent,
}
