"""Latency by table: the time of each layer at some widths on this machine, interpolated between them.

A target needs the latency of thousands of cuts that are never built. The table has, for every convolution and linear
layer, the time at five input by five output widths; for every BatchNorm (with a ReLU) and for an index on its channels
the time at five widths; and what the whole dense network takes beyond the sum of its parts, which is taken as fixed.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softprune.cut import ModuleCut, PrunePlan, plain_copy
from softprune.devices import time_ms
from softprune.errors import ConfigError, ModelError, first_line
from softprune.graph import ChannelGraph, trace
from softprune.graph.channels import LayerOp, NormOp
from softprune.graph.reader import Example, ExampleLike
from softprune.io import write_atomically
from softprune.log import get_logger
from softprune.module_state import evaluating

logger = get_logger(__name__)

_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Grid:
    """Milliseconds at some input widths (rows) and output widths (columns); one row if only the outputs matter."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]

    def __call__(self, inputs: int, outputs: int) -> float:
        """The time at two widths; below the smallest measured width it is the time there."""
        by_row = [float(np.interp(outputs, self.outputs, row)) for row in self.ms]
        return float(np.interp(inputs, self.inputs, by_row))

    @classmethod
    def total(cls, calls: Sequence[Grid]) -> Grid:
        """The sum over the calls of one layer."""
        total = np.sum([call.ms for call in calls], axis=0)
        return cls(calls[0].inputs, calls[0].outputs, tuple(map(tuple, total.tolist())))


@dataclass(frozen=True)
class LatencyTable:
    """The latency of any cut of one network, as measured on one machine. Call it with a plan."""

    backend: str
    device: str
    batch: int | None
    threads: int
    layers: dict[str, Grid]
    """Convolutions and linear layers, by width in and width out."""
    norms: dict[str, Grid]
    """BatchNorms with a ReLU, by width."""
    indices: dict[str, Grid]
    """A constant index in front of a layer or BatchNorm that may have one, by the number of channels that it picks."""
    dense_ms: float
    """The whole dense network, measured."""
    rest_ms: float
    """What it takes beyond its parts; the same for every cut."""
    scale: float
    """Below 1 where the parts together take longer than the network."""

    def __call__(self, plan: PrunePlan) -> float:
        """Milliseconds of the network that `plan` leaves, by the table."""
        return self.rest_ms + self.scale * self._parts(plan.modules)

    def _parts(self, modules: Mapping[str, ModuleCut]) -> float:
        total = 0.0
        for name, cut in modules.items():
            grid = self.layers.get(name) or self.norms.get(name)
            if grid is not None and not cut.constant:
                total += grid(len(cut.inputs), len(cut.outputs))
            if cut.select is not None and name in self.indices:
                total += self.indices[name](1, len(cut.select))
        return total

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, for `latency_table` of a pruner on another machine."""
        content = json.dumps(asdict(self), indent=1).encode()
        write_atomically(Path(path), content, then="save the table again", follow_link=True)

    @classmethod
    def read(cls, source: TableLike) -> LatencyTable:
        """Return a table from itself, from its fields, or from the file that :meth:`save` wrote."""
        if isinstance(source, LatencyTable):
            return source
        try:
            fields = source if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
            return cls(**{**fields, **{kind: _grids(fields[kind]) for kind in ("layers", "norms", "indices")}})
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            name = "other fields" if isinstance(source, Mapping) else repr(source)
            raise ConfigError(
                "`latency_table` must be what softprune.budget.latency_table returns, or the file that save() wrote. "
                f"Got {name}: {first_line(error)}. Measure and save it again, or leave it out to measure here."
            ) from error

    def check(self, graph: ChannelGraph) -> None:
        """Raise a ConfigError unless the table is of this network."""
        records: list[LayerOp | NormOp] = [*graph.layers, *graph.norms]
        widths = {record.name: len(record.outputs) for record in records}
        measured = {name: grid.outputs[-1] for name, grid in (*self.layers.items(), *self.norms.items())}
        other = [name for name, width in measured.items() if widths.get(name) != width]
        if other:
            raise ConfigError(
                f"`latency_table` must be of the same network. Got one whose layer {other[0]!r} is missing here or has "
                "another width; measure this network with softprune.budget.latency_table(model, example)."
            )

    def report(self, plan: PrunePlan, compact: nn.Module, example: Example) -> float:
        """Log what the cut network takes beside what the table says; returns the measured milliseconds."""
        call = example.to_model(compact)
        call = call if self.batch is None else call.with_batch(self.batch)
        device = next(compact.parameters()).device
        with evaluating(compact):
            measured = time_ms(lambda: compact(*call.args, **call.kwargs), device)
        logger.info(
            "latency: %.3f ms by the table (%s), %.3f ms measured here; dense %.3f ms",
            self(plan),
            self.device,
            measured,
            self.dense_ms,
        )
        return measured


def _grids(fields: Mapping[str, Any]) -> dict[str, Grid]:
    """Return the grids of layers from their fields."""
    return {
        str(name): Grid(tuple(each["inputs"]), tuple(each["outputs"]), tuple(map(tuple, each["ms"])))
        for name, each in fields.items()
    }


TableLike = LatencyTable | Mapping[str, Any] | str | os.PathLike[str]
"""A table, its fields, or the path of its file."""


def latency_table(model: nn.Module, example: ExampleLike, *, batch: int | None = None) -> LatencyTable:
    """Measure the layers of a model where it is, for targets of latency that are pursued on another machine.

    `batch`: samples per call; as many as `example` has by default.
    """
    return measure_latency(trace(model, example), model, example, batch=batch)


@torch.no_grad()
def measure_latency(
    graph: ChannelGraph, network: nn.Module, example: ExampleLike, *, batch: int | None = None
) -> LatencyTable:
    """Measure the layers of `network`, masked or not, where it is, in eval mode and in PyTorch's eager mode.

    `batch`: samples per call; as many as `example` has by default.
    """
    call = Example.of(example).to_model(network)
    if batch is not None:
        if call.batch_size() is None:
            raise ModelError(
                "A batch size can be chosen where all tensors of the example share their first dimension. "
                "Got others; pass an example of the size you want instead."
            )
        call = call.with_batch(batch)
    plain = plain_copy(network).eval()
    shapes = _input_shapes(plain, call)
    like = next(plain.parameters())
    bench, device = _Bench(like), like.device
    layers, norms, indices = {}, {}, {}
    records: list[LayerOp | NormOp] = [*graph.layers, *graph.norms]
    for record in records:
        # A layer may be called at several sizes, as the heads of a pyramid, and by modules that share its weights.
        names = dict.fromkeys(use.module for use in record.uses)
        calls = [(plain.get_submodule(name), shape) for name in names for shape in shapes.get(name, ())]
        # A layer whose weight is used outside its module is no call that could be timed: part of the rest.
        if not calls:
            continue
        if isinstance(record, LayerOp):
            layers[record.name] = Grid.total([bench.layer(record, module, shape) for module, shape in calls])
        else:
            norms[record.name] = Grid.total([bench.widths(shape, _normalise) for _, shape in calls])
        if record.selectable:
            indices[record.name] = Grid.total([bench.widths(shape, _pick) for _, shape in calls])
    dense_ms = time_ms(lambda: plain(*call.args, **call.kwargs), device)
    parts = sum(grid.ms[-1][-1] for grid in (*layers.values(), *norms.values()))
    logger.info("latency: %.3f ms measured, %.3f ms in %d parts", dense_ms, parts, len(layers) + len(norms))
    return LatencyTable(
        backend="eager",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        batch=call.batch_size(),
        threads=torch.get_num_threads(),
        layers=layers,
        norms=norms,
        indices=indices,
        dense_ms=dense_ms,
        rest_ms=max(dense_ms - parts, 0.0),
        scale=min(dense_ms / max(parts, 1e-9), 1.0),
    )


def _input_shapes(network: nn.Module, call: Example) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the first argument of every call of every module."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    handles = []
    for name, module in network.named_modules():

        def note(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if args and isinstance(args[0], Tensor):
                shapes.setdefault(name, []).append(tuple(args[0].shape))

        handles.append(module.register_forward_pre_hook(note))
    network(*call.args, **call.kwargs)
    for handle in handles:
        handle.remove()
    return shapes


def _widths(width: int) -> tuple[int, ...]:
    return tuple(sorted({1, *(max(1, round(share * width)) for share in _SHARES)}))


class _Bench:
    """Times layers over their widths on the device and in the precision of a tensor, layers of one shape once."""

    def __init__(self, like: Tensor) -> None:
        self.device = like.device
        self._kind: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self._known: dict[Any, Grid] = {}

    def layer(self, record: LayerOp, module: nn.Module, shape: tuple[int, ...]) -> Grid:
        """A layer. Groups keep their number, and a depthwise layer its one channel for each group."""
        key = (repr(module), shape)
        if key in self._known:
            return self._known[key]
        groups, width_in, width_out = record.groups, len(record.inputs), len(record.outputs)
        if groups > 1 and groups == width_in:
            inputs = _widths(width_in)
            outputs = tuple(width_out // width_in * width for width in inputs)
            rows = [[self._layer_ms(record, module, shape, *at, at[0]) for at in zip(inputs, outputs, strict=True)]]
            inputs = (1,)
        else:
            inputs = tuple(groups * width for width in _widths(width_in // groups))
            outputs = tuple(groups * width for width in _widths(width_out // groups))
            rows = [[self._layer_ms(record, module, shape, i, o, groups) for o in outputs] for i in inputs]
        self._known[key] = _rising(inputs, outputs, rows)
        return self._known[key]

    def _layer_ms(
        self, record: LayerOp, module: nn.Module, shape: tuple[int, ...], inputs: int, outputs: int, groups: int
    ) -> float:
        trial: Any = copy.deepcopy(module)
        kernel = trial.weight.shape[2:]
        sides = (outputs, inputs // groups)
        if record.kind == "conv_transpose":
            sides = (inputs, outputs // groups)
        trial.weight = nn.Parameter(torch.randn(*sides, *kernel, **self._kind))
        if trial.bias is not None:
            trial.bias = nn.Parameter(torch.zeros(outputs, **self._kind))
        if record.kind != "linear":
            trial.groups = groups
        place = len(shape) - 1 - len(kernel)
        x = torch.randn(*shape[:place], inputs, *shape[place + 1 :], **self._kind)
        return time_ms(lambda: trial(x), self.device)

    def widths(self, shape: tuple[int, ...], build: Callable[[int, Tensor], Callable[[], object]]) -> Grid:
        """What `build` makes of a number of channels and an input."""
        key = (build, shape)
        if key not in self._known:
            x = torch.randn(*shape, **self._kind)
            widths = _widths(shape[1])
            self._known[key] = _rising((1,), widths, [[time_ms(build(width, x), self.device) for width in widths]])
        return self._known[key]


def _normalise(width: int, x: Tensor) -> Callable[[], object]:
    part = x[:, :width].contiguous()
    ones, zeros = x.new_ones(width), x.new_zeros(width)
    return lambda: torch.relu(torch.nn.functional.batch_norm(part, zeros, ones, ones, zeros))


def _pick(width: int, x: Tensor) -> Callable[[], object]:
    index = torch.arange(width, device=x.device)
    return lambda: x.index_select(1, index)


def _rising(inputs: tuple[int, ...], outputs: tuple[int, ...], ms: list[list[float]]) -> Grid:
    """Times that never fall with a width: a narrower layer that seems slower was measured on a busy machine."""
    steady = np.minimum.accumulate(np.minimum.accumulate(np.array(ms)[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
    return Grid(inputs, outputs, tuple(tuple(float(value) for value in row) for row in steady))
