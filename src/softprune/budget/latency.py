"""Predict the latency of cuts from a table of layer times, calibrated with whole networks.

A latency target needs the latencies of thousands of cuts that are never built. In the target runtime, the table has the
times of every convolution and linear layer on a grid of input and output widths, of every BatchNorm with a ReLU, and of
every gather of channels. The sum over the layers of a cut is mapped to a latency by the measured latencies of the dense
network and two real cuts, which include launches, fusion and additions.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from softprune.bench import Runtime, paired_ratio
from softprune.cut import PrunePlan, make_plan, plain_copy
from softprune.cut.apply import apply_plan
from softprune.cut.selection import read_graph
from softprune.devices import IMAGE_CHANNELS, Call, seconds, synchronizer
from softprune.errors import ConfigError, first_line, import_optional
from softprune.graph import ChannelGraph
from softprune.graph.channels import KINDS, LayerOp, NormOp
from softprune.graph.modules import Select
from softprune.graph.reader import Example, ExampleLike
from softprune.io import read_bytes, write_atomically
from softprune.log import get_logger

logger = get_logger(__name__)

POINTS = 6
"""Maximum number of widths at which a layer is measured, per side."""
LARGE = 2**24
"""Layers with at least this many weights are measured at three widths per side, to save memory."""
TRIAL_SHARES = (0.45, 0.7)
"""Shares of the channels of every site that the calibration cuts keep."""
CLOSE = 0.05
"""Relative difference between predicted and measured latency above which a warning is logged."""
_ROUNDS, _ROUND_SECONDS = 5, 0.002
_CAPTURED = 10
"""Calls per CUDA graph, so that the launch overhead is negligible."""

Part = tuple[Any, Tensor]
"""A module and its input."""


@dataclass(frozen=True)
class Grid:
    """Times in milliseconds at input widths (rows) and output widths (columns); one row if only the outputs matter."""

    inputs: list[int]
    outputs: list[int]
    ms: list[list[float]]

    def __call__(self, inputs: int, outputs: int) -> float:
        """Interpolate the time at two widths; outside the grid, return the time at its edge."""
        return float(np.interp(inputs, self.inputs, [np.interp(outputs, self.outputs, row) for row in self.ms]))

    @classmethod
    def total(cls, calls: Sequence[Grid]) -> Grid:
        """Return the sum over the calls of a layer."""
        return cls(calls[0].inputs, calls[0].outputs, np.sum([call.ms for call in calls], axis=0).tolist())


@dataclass(frozen=True)
class LatencyTable:
    """Predicts the latency of any cut of a network, from measurements on one machine. Call it with a plan."""

    runtime: Runtime
    device: str
    shapes: list[list[int]]
    """Input shapes without the batch dimension."""
    layers: dict[str, Grid]
    """Times of convolutions and linear layers, by input and output width."""
    norms: dict[str, Grid]
    """Times of BatchNorms with a ReLU, by width. Empty for ONNX Runtime, which folds them into the layers."""
    indices: dict[str, Grid]
    """Times of the gather that a cut may insert before a layer or BatchNorm, by the number of gathered channels."""
    parts_ms: list[float]
    """Sums of the layer times of the calibration networks, in ascending order, from 0 up to the dense network."""
    whole_ms: list[float]
    """Latencies of the calibration networks, extrapolated at 0."""

    def __call__(self, plan: PrunePlan) -> float:
        """Return the predicted latency of the compact network of `plan`, in milliseconds."""
        return float(np.interp(self.parts(plan), self.parts_ms, self.whole_ms))

    @property
    def dense_ms(self) -> float:
        return self.whole_ms[-1]

    @property
    def floor_hint(self) -> str:
        """Text for an error about an unreachable target: the time that no cut can remove."""
        return (
            f" Of the dense {self.dense_ms:.4g} ms, {self.whole_ms[0]:.4g} ms belong to no layer: measure on an idle "
            "machine, or with a larger batch (in the example or a `latency_table`), where layers take a larger share."
        )

    def parts(self, plan: PrunePlan) -> float:
        """Return the sum of the layer times of a cut, in milliseconds."""
        total = 0.0
        for name, cut in plan.modules.items():
            if plan.goes(name):
                continue
            grid = self.layers.get(name) or self.norms.get(name)
            if grid is not None and not cut.constant:
                total += grid(len(cut.inputs), len(cut.outputs))
            if cut.select is not None and name in self.indices:
                total += self.indices[name](1, len(cut.select))
        return total

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the table as JSON, for the argument `latency_table` of a pruner on another machine."""
        content = json.dumps(asdict(self), indent=1).encode()
        write_atomically(Path(path), content, then="save the table again", follow_link=True)

    @classmethod
    def read(cls, source: TableLike) -> LatencyTable:
        """Return a table from a table, its fields, or a file written by :meth:`save`."""
        if isinstance(source, LatencyTable):
            return source
        try:
            fields = source if isinstance(source, Mapping) else json.loads(read_bytes(Path(source)))
            kinds = {key: fields[key] for key in ("layers", "norms", "indices")}
            grids = {key: {name: Grid(**each) for name, each in kind.items()} for key, kind in kinds.items()}
            return cls(**{**fields, **grids, "runtime": Runtime(**fields["runtime"])})
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            name = "other fields" if isinstance(source, Mapping) else repr(source)
            raise ConfigError(
                "`latency_table` must be a result of softprune.budget.latency_table, or a file written by its save(). "
                f"Got {name}: {first_line(error)}. Measure and save it again, or omit it to measure here."
            ) from error

    def check(self, graph: ChannelGraph) -> None:
        """Raise a ConfigError unless the table was measured with this network."""
        records: list[LayerOp | NormOp] = [*graph.layers, *graph.norms]
        widths = {record.name: len(record.outputs) for record in records}
        measured = {name: grid.outputs[-1] for name, grid in (*self.layers.items(), *self.norms.items())}
        other = [name for name, width in measured.items() if widths.get(name) != width]
        if other:
            raise ConfigError(
                f"`latency_table` must be of the same network. Got a table whose layer {other[0]!r} is missing here or "
                "has another width; measure this network with softprune.budget.latency_table(model, example)."
            )

    def report(self, plan: PrunePlan, compact: nn.Module, example: Example) -> float | None:
        """Log the latency of the cut network and return it in ms; on another device or input, log the prediction."""
        expected = self(plan)
        if self.device != _device_name(self.runtime) or self.shapes != _shapes(example):
            where = f"{self.device}, inputs {self.shapes}"
            logger.info("latency: %.3f ms by the table of %s; dense %.3f ms", expected, where, self.dense_ms)
            return None
        measured = min(self.runtime.time({"compact": compact}, example)["compact"].blocks)
        logger.log(
            logging.WARNING if abs(measured - expected) > CLOSE * expected else logging.INFO,
            "latency: %.3f ms by the table, %.3f ms measured here in %s; dense %.3f ms",
            *(expected, measured, self.runtime.backend, self.dense_ms),
        )
        return measured


TableLike = LatencyTable | Mapping[str, Any] | str | os.PathLike[str]
"""A table, its fields, or the path of a saved one."""


def latency_table(
    model: nn.Module, example: ExampleLike, *, runtime: Runtime | None = None, round_to: int = 1
) -> LatencyTable:
    """Measure the latency table of a model, for a runtime or machine other than that of the training.

    Args:
        model: The network, before pruning.
        example: An input: a tensor, a tuple of arguments, or (args, kwargs).
        runtime: The runtime in which the network will be deployed. By default eager PyTorch, with the device and dtype
            of the model and the batch size of `example`.
        round_to: The `round_to` of the pruner.
    """
    runtime = runtime or own_runtime(model, Example.of(example))
    return measure_latency(read_graph(model, example, kinds=KINDS), model, example, runtime, round_to)


def own_runtime(model: nn.Module, example: Example) -> Runtime:
    """Return eager PyTorch with the device and dtype of the model and the batch size of the example."""
    like, batch = next(model.parameters()), example.batch_size() or 1
    return Runtime(device=str(like.device), dtype=str(like.dtype).removeprefix("torch."), batch=batch)


@torch.no_grad()
def measure_latency(
    graph: ChannelGraph, network: nn.Module, example: ExampleLike, runtime: Runtime, round_to: int
) -> LatencyTable:
    """Measure the layers of `network`, which may have masks, and the calibration cuts. See :func:`latency_table`."""
    plain = plain_copy(network).eval()
    call = Example.of(example).to_model(plain)
    call = call if call.batch_size() is None else call.with_batch(runtime.batch)
    shapes: dict[Any, list[tuple[int, ...]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            shapes.setdefault(module, []).append(tuple(args[0].shape))

    with register_module_forward_pre_hook(note):
        plain(*call.args, **call.kwargs)
    layers, norms, indices = {}, {}, {}
    parts = _Parts(runtime, round_to)
    records: list[LayerOp | NormOp] = [*graph.layers, *graph.norms]
    with runtime.threads_set():
        for record in records:
            module = plain.get_submodule(record.name)
            # A layer may be called with several input sizes, such as the heads of a feature pyramid.
            calls = shapes.get(module, ())
            # If only its weight is used, outside its module, there is no call to time: calibration covers it.
            if not calls:
                continue
            if isinstance(record, LayerOp):
                layers[record.name] = Grid.total([parts.layer(record, module, shape) for shape in calls])
            elif runtime.backend != "onnxruntime":  # ONNX Runtime folds it into the preceding layer
                norms[record.name] = Grid.total([parts.widths(_Normalise, shape) for shape in calls])
            if record.selectable:
                indices[record.name] = Grid.total([parts.widths(_select, shape) for shape in calls])
    table = LatencyTable(runtime, _device_name(runtime), _shapes(call), layers, norms, indices, [], [])
    plans = {1.0: make_plan(graph, network, {})}
    for share in TRIAL_SHARES:
        counts = {site.name: -(-max(1, round(share * site.width)) // round_to) * round_to for site in graph.sites}
        masks = {site.name: torch.arange(site.width) < counts[site.name] for site in graph.sites}
        plans[share] = make_plan(graph, network, masks, round_to=round_to)
    networks = {str(share): apply_plan(plan, network) for share, plan in plans.items()}
    found = runtime.time(networks, call)
    dense = found["1.0"]
    # Ratios of adjacent blocks, since other load on the machine affects both.
    whole = {share: min(dense.blocks) * paired_ratio(found[str(share)], dense).median for share in plans}
    sums = {share: table.parts(plan) for share, plan in plans.items()}
    useful = sorted((share for share in plans if share == 1 or sums[share] < sums[1.0]), key=lambda share: sums[share])
    # A cut may measure slower than a larger network, but latencies must not decrease with the sum of layer times.
    times = np.minimum.accumulate([whole[share] for share in reversed(useful)])[::-1].tolist()
    least = [sums[share] for share in useful]
    logger.info(
        "latency in %s on %s, batch %d, by share of channels: %s ms; the layers take %.3f of %.3f ms",
        *(runtime.backend, table.device, runtime.batch),
        ", ".join(f"{share:g}: {ms:.3f}" for share, ms in whole.items()),
        *(sums[1.0], whole[1.0]),
    )
    slope = (times[1] - times[0]) / (least[1] - least[0]) if len(least) > 1 else 1.0
    start = max(times[0] - slope * least[0], 0.0)
    return replace(table, parts_ms=[0.0, *least], whole_ms=[start, *times])


def _shapes(example: Example) -> list[list[int]]:
    return [list(tensor.shape[1:]) for tensor in example.tensors()]


def _device_name(runtime: Runtime) -> str:
    return torch.cuda.get_device_name(runtime.device) if runtime.on_gpu and torch.cuda.is_available() else "cpu"


def measured_widths(width: int, multiple: int, points: int = POINTS) -> list[int]:
    """Return the widths to measure: multiples of `multiple`; if it is 1, odd widths, since most cuts have these."""
    if width <= IMAGE_CHANNELS:
        return [width]
    every = sorted({*range(multiple, width, multiple if multiple > 1 else 2), width})
    return [every[round(at)] for at in np.linspace(0, len(every) - 1, min(points, len(every)))]


class _Normalise(nn.Module):
    """A BatchNorm with a ReLU on the first `width` channels of `x`."""

    def __init__(self, width: int, x: Tensor) -> None:
        super().__init__()
        self.x, self.ones = x[:, :width].clone(memory_format=torch.preserve_format), x.new_ones(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.batch_norm(self.x, self.ones, self.ones, self.ones, self.ones))


def _select(width: int, x: Tensor) -> nn.Module:
    return Select(torch.arange(width), x.shape[1]).to(x.device)


class _Parts:
    """Times layers at several widths in a runtime; equal layers with equal inputs are timed once."""

    def __init__(self, runtime: Runtime, multiple: int) -> None:
        self.runtime, self.multiple = runtime, multiple
        self._known: dict[Any, Grid] = {}

    def layer(self, record: LayerOp, module: nn.Module, shape: tuple[int, ...]) -> Grid:
        """Return the times of a layer. The number of groups stays the same, except for depthwise convolutions."""
        key = (repr(module), shape)
        if key not in self._known:
            groups, width_in, width_out = record.groups, len(record.inputs), len(record.outputs)
            points_a_side = POINTS if cast(Tensor, module.weight).numel() < LARGE else 3
            if groups > 1 and groups == width_in:
                rows, inputs = measured_widths(width_in, self.multiple), [1]
                outputs = [width_out // width_in * width for width in rows]
                points = [(i, o, i) for i, o in zip(rows, outputs, strict=True)]
            else:
                multiple = max(self.multiple // groups, 1)
                inputs = [groups * width for width in measured_widths(width_in // groups, multiple, points_a_side)]
                outputs = [groups * width for width in measured_widths(width_out // groups, multiple, points_a_side)]
                points = [(i, o, groups) for i in inputs for o in outputs]
            times = self._times([self._resized(record, module, shape, *point) for point in points])
            self._known[key] = Grid(inputs, outputs, np.reshape(times, (len(inputs), -1)).tolist())
        return self._known[key]

    def _resized(
        self, record: LayerOp, module: nn.Module, shape: tuple[int, ...], inputs: int, outputs: int, groups: int
    ) -> Part:
        trial: Any = copy.deepcopy(module)
        kernel = trial.weight.shape[2:]
        sides = (inputs, outputs // groups) if record.kind == "conv_transpose" else (outputs, inputs // groups)
        trial.weight = nn.Parameter(self.runtime.place(torch.randn(*sides, *kernel)))
        trial.bias = None
        if record.kind != "linear":
            trial.groups = groups
        place = len(shape) - 1 - len(kernel)
        return trial, self.runtime.place(torch.randn(*shape[:place], inputs, *shape[place + 1 :]))

    def widths(self, kind: Callable[[int, Tensor], nn.Module], shape: tuple[int, ...]) -> Grid:
        """Return the times of a BatchNorm or a gather, by the number of channels."""
        if (kind, shape) not in self._known:
            x, widths = self.runtime.place(torch.randn(*shape)), measured_widths(shape[1], self.multiple)
            self._known[kind, shape] = Grid([1], widths, [self._times([(kind(width, x), x) for width in widths])])
        return self._known[kind, shape]

    def _times(self, parts: Sequence[Part]) -> list[float]:
        """Return the minimum time of each part in milliseconds, over several rounds through all parts."""
        runtime, repeated = self.runtime, 1
        if runtime.backend == "onnxruntime":
            return _onnx_times(parts, runtime.threads)
        wait = synchronizer(torch.device(runtime.device))
        calls: list[Call] = [functools.partial(part, x) for part, x in parts]
        if runtime.on_gpu and runtime.backend != "eager":
            repeated = _CAPTURED
            calls = [runtime.captured(call, repeated) for call in calls]
        for call in calls:
            seconds(call, 2, wait)
        counts = [max(1, round(_ROUND_SECONDS / max(seconds(call, 1, wait), 1e-7))) for call in calls]
        rounds = [[seconds(*each, wait) for each in zip(calls, counts, strict=True)] for _ in range(_ROUNDS)]
        return cast(list[float], (1000 * np.min(rounds, axis=0) / counts / repeated).tolist())


def _onnx_times(parts: Sequence[Part], threads: int) -> list[float]:
    """Return the minimum times of operators from ONNX Runtime's profiler, without layout conversions, in ms."""
    if len(parts) > 1 and sum(part.weight.numel() for part, _ in parts if hasattr(part, "weight")) > 2**28:
        half = len(parts) // 2  # an ONNX file is limited to 2 GB
        return _onnx_times(parts[:half], threads) + _onnx_times(parts[half:], threads)
    onnx, runtime = (import_optional(name, "ONNX", "onnx onnxscript onnxruntime") for name in ("onnx", "onnxruntime"))
    nodes, constants, feed = [], [], {f"x{number}": x.numpy() for number, (_, x) in enumerate(parts)}
    for number, (part, _) in enumerate(parts):
        operator, constant, attributes = _operator(part)
        constants.append(onnx.numpy_helper.from_array(constant.contiguous().numpy(), f"w{number}"))
        names = [f"x{number}", f"w{number}"], [f"y{number}"]
        nodes.append(onnx.helper.make_node(operator, *names, name=f"y{number}", **attributes))
    kind = onnx.TensorProto.FLOAT
    inputs = [onnx.helper.make_tensor_value_info(name, kind, x.shape) for name, x in feed.items()]
    outputs = [onnx.helper.make_tensor_value_info(node.name, kind, None) for node in nodes]
    graph = onnx.helper.make_graph(nodes, "parts", inputs, outputs, constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.enable_profiling = threads, 3, True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = f"{folder}/profile"
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for _ in range(4 * _ROUNDS):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    least: dict[str, float] = {}
    for event in (event for event in events if event["name"].endswith("_kernel_time")):
        name = event["name"].removesuffix("_kernel_time").removesuffix("_nchwc")
        least[name] = min(event["dur"] / 1000, least.get(name, np.inf))
    return [least[node.name] for node in nodes]


def _operator(part: Any) -> tuple[str, Tensor, dict[str, Any]]:
    """Return ONNX operator, constant and attributes of a part."""
    if isinstance(part, Select):
        return "Gather", part.index, {"axis": 1}
    if isinstance(part, nn.Linear):
        return "MatMul", part.weight.detach().T, {}
    attributes: dict[str, Any] = {"group": part.groups, "strides": part.stride, "dilations": part.dilation}
    if isinstance(part.padding, str):
        attributes["auto_pad"] = "SAME_UPPER" if part.padding == "same" else "VALID"
    else:
        attributes["pads"] = [*part.padding, *part.padding]
    return "ConvTranspose" if part.transposed else "Conv", part.weight.detach(), attributes
