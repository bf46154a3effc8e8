"""Compare the latency of dense and compact networks, and explain why a compact network is not faster."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from softprune.costs import Cost, cost
from softprune.cut.apply import duplicated
from softprune.devices import WIDTH_MULTIPLE, Call, capture_graph, disliked_widths, seconds, synchronizer
from softprune.errors import ConfigError, SoftpruneError, check_choice, first_line
from softprune.export import fold_batch_norms, onnx_content, onnx_session
from softprune.graph import Example, ExampleLike
from softprune.graph.modules import Select
from softprune.masks import check_unmasked

__all__ = ["BenchReport", "BenchRow", "Runtime", "Timing", "alternate", "compare_latency"]

BACKENDS = ("eager", "graph", "compile", "onnxruntime")
"""Eager PyTorch, eager PyTorch captured as a CUDA graph, torch.compile, and ONNX Runtime on the CPU."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
BLOCK_SECONDS = 0.02
"""Approximate length of a timed block. In shorter ones the resolution of the clock matters."""
MOST_CALLS = 1000


# --- runtimes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Backend, device, dtype, batch size and threads of a measurement. :func:`compare_latency` documents them."""

    backend: str = "eager"
    device: str = "cpu"
    dtype: str = "float32"
    batch: int = 1
    threads: int = 0

    def __post_init__(self) -> None:
        check_choice("A backend", self.backend, BACKENDS)
        check_choice("`dtype`", self.dtype, DTYPES)
        if self.batch < 1:
            raise ConfigError(f"A batch must have at least one sample. Got {self.batch!r}.")

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def channels_last(self) -> bool:
        """Whether to use the channels-last memory format, which is faster on tensor cores."""
        return self.on_gpu and DTYPES[self.dtype].itemsize == 2

    def place(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to the device, dtype and memory format."""
        moved = tensor.to(self.device, DTYPES[self.dtype] if tensor.is_floating_point() else None)
        order = torch.channels_last if self.channels_last else torch.contiguous_format
        return moved.contiguous(memory_format=order) if tensor.ndim == 4 else moved

    def call(self, model: nn.Module, example: ExampleLike) -> Call:
        """Return a function that runs a copy of `model` in eval mode on `example` with batch size `batch`."""
        if self.backend == "onnxruntime" and (self.on_gpu or self.dtype != "float32"):
            raise ConfigError(f"The onnxruntime backend needs the CPU and float32. Got {self.device} and {self.dtype}.")
        if self.backend == "graph" and not self.on_gpu:
            raise ConfigError(f"The graph backend needs an NVIDIA GPU. Got {self.device}; use eager or compile.")
        network = duplicated(model).eval()
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data = self.place(tensor.data)
        given = Example.of(example)
        given = (given if given.batch_size() is None else given.with_batch(self.batch)).map(self.place)
        if self.backend == "onnxruntime":
            content = onnx_content(network, given, dynamic_batch=False)
            return onnx_session(content, threads=self.threads)(given)
        forward = self._compiled(network) if self.backend == "compile" else network

        def call() -> object:
            with torch.inference_mode():
                return forward(*given.args, **given.kwargs)

        return self.captured(call) if self.backend == "graph" else call

    def captured(self, call: Call, times: int = 1) -> Call:
        """Capture `times` calls of `call` as a CUDA graph, and return a function that replays it."""

        def body() -> None:
            for _ in range(times):
                call()

        graph = capture_graph(body, torch.device(self.device), trial=call, undo=lambda: None)

        def replay() -> Call:
            graph.replay()
            return call  # keeps the input alive, which the graph reads by address

        return replay

    def _compiled(self, network: nn.Module) -> Any:
        if not self.on_gpu:
            return torch.compile(network, dynamic=False)
        options = torch._inductor.list_mode_options("reduce-overhead")  # CUDA graphs
        if not self.channels_last:
            # By default, inductor converts convolutions to channels_last, which is slower for large float32 batches.
            options |= {"layout_optimization": False}
        return torch.compile(network, dynamic=False, options=options)

    @contextmanager
    def threads_set(self) -> Iterator[None]:
        """Set PyTorch's number of CPU threads within the block."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def time(self, networks: Mapping[str, nn.Module], example: Example, repeats: int = 15) -> "dict[str, Timing]":
        """Time the networks in alternation."""
        torch.compiler.reset()  # each measurement compiles for its own shapes and must not hit the recompilation limit
        with self.threads_set():
            calls = {name: self.call(network, example) for name, network in networks.items()}
            # In the first call cuDNN chooses algorithms, which the compiled networks reuse.
            with torch.compiler.set_stance("force_eager"):
                for call in calls.values():
                    call()
            return alternate(calls, repeats=repeats, finish=synchronizer(torch.device(self.device)))


# --- timing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Time per call in milliseconds, for each of several blocks."""

    blocks: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.blocks)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile."""
        if len(self.blocks) < 2:
            return self.blocks[0], self.blocks[0]
        low, _, high = statistics.quantiles(self.blocks, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        low, high = self.spread
        return f"{self.median:.3g} ms ({low:.3g} to {high:.3g})"


def alternate(
    calls: Mapping[str, Call], *, repeats: int = 15, warm_up: int = 3, finish: Call = lambda: None
) -> dict[str, Timing]:
    """Time functions in `repeats` alternating blocks (A B, B A, A B, ...), after `warm_up` untimed calls of each.

    `finish` is called before the clock is read, to synchronise with a GPU.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    # All blocks have the same number of calls, so that a fixed cost per block has the same weight.
    slowest = max(seconds(call, 1, finish) for call in calls.values())
    number = min(max(int(BLOCK_SECONDS / max(slowest, 1e-9)), 1), MOST_CALLS)
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(repeats):
        for name in order:
            blocks[name].append(1000 * seconds(calls[name], number, finish) / number)
        order.reverse()
    return {name: Timing(tuple(values)) for name, values in blocks.items()}


def paired_ratio(slow: Timing, fast: Timing) -> Timing:
    """Return the ratios slow / fast of adjacent blocks."""
    return Timing(tuple(a / b for a, b in zip(slow.blocks, fast.blocks, strict=True)))


# --- dense against compact -------------------------------------------------------------------------------------

FASTER = 1.03
"""Speed-ups below this may be noise and count as none."""


@dataclass(frozen=True, kw_only=True)
class BenchRow(Runtime):
    """Latency of the dense and the compact network in one runtime."""

    dense: Timing | None = None
    compact: Timing | None = None
    mac_ratio: float
    """Dense MACs divided by compact MACs: the speed-up if time were proportional to MACs."""
    note: str = ""
    """Reason for a missing measurement."""

    @property
    def ratio(self) -> Timing | None:
        return paired_ratio(self.dense, self.compact) if self.dense and self.compact else None

    @property
    def speed_up(self) -> float | None:
        """Dense time divided by compact time, the median over adjacent blocks."""
        return None if self.ratio is None else self.ratio.median

    @property
    def realised(self) -> float | None:
        """Speed-up divided by MAC ratio: 1 if the speed-up equals the MAC reduction."""
        return self.speed_up and self.speed_up / self.mac_ratio

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary for JSON."""
        values = asdict(self) | {"speed_up": self.speed_up, "realised": self.realised}
        for side, timing in (("dense", self.dense), ("compact", self.compact)):
            if timing is not None:
                low, high = timing.spread
                numbers = {"median_ms": timing.median, "low_ms": low, "high_ms": high}
                values[side] = numbers | {"blocks": len(timing.blocks)}
        return values | {"speed_up_spread": self.ratio and [*self.ratio.spread]}


@dataclass(frozen=True)
class BenchReport:
    """The rows of a latency comparison. Prints as a table."""

    rows: tuple[BenchRow, ...]
    dense_macs: int
    compact_macs: int
    advice: tuple[str, ...] = ()
    """Likely causes and remedies if the compact network is not faster."""

    def __str__(self) -> str:
        lines = [
            f"MACs per input: {self.dense_macs:,} dense, {self.compact_macs:,} compact",
            f"{'backend':<12} {'device':<5} {'dtype':<9} {'batch':>5}  {'dense':<28} {'compact':<28} "
            f"{'speed-up':<22} realised",
        ]
        for row in self.rows:
            head = f"{row.backend:<12} {row.device:<5} {row.dtype:<9} {row.batch:>5}  "
            if row.ratio is None:
                lines.append(head + row.note)
                continue
            low, high = row.ratio.spread
            faster = f"{row.speed_up:.2f} ({low:.2f} to {high:.2f})"
            lines.append(f"{head}{row.dense!s:<28} {row.compact!s:<28} {faster:<22} {row.realised:.2f}")
        return "\n".join([*lines, *self.advice])

    __repr__ = __str__  # for notebooks


def compare_latency(
    dense: nn.Module,
    compact: nn.Module,
    example: ExampleLike,
    *,
    backends: Iterable[str] = ("eager",),
    batches: Iterable[int] = (1,),
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    threads: int = 0,
    fold_bn: bool = False,
    repeats: int = 15,
) -> BenchReport:
    """Measure the latencies of `dense` and `compact` on this machine, in alternating blocks.

    Args:
        dense: The network before pruning, with any weights.
        compact: The network after pruning.
        example: An input of both: a tensor, a tuple of arguments, or (args, kwargs).
        backends: "eager", "graph" (eager as a CUDA graph), "compile" (on a GPU with CUDA graphs) or "onnxruntime".
        batches: Batch sizes. The example is repeated to fill them.
        device: The device to measure on.
        dtype: Precision of weights and inputs: "float32", "bfloat16", "float16" or "float64".
        threads: CPU threads; 0 keeps the current number.
        fold_bn: Fold BatchNorms into the preceding layers, in both networks.
        repeats: Number of timed blocks per network.
    """
    runtimes = [
        Runtime(backend=backend, device=str(device), dtype=dtype, batch=size, threads=threads)
        for backend in backends
        for size in batches
    ]
    for name, model in (("dense", dense), ("compact", compact)):
        check_unmasked(model, "a benchmark", name=name)
    given = Example.of(example)
    if given.batch_size() is None:
        raise ConfigError(
            "A benchmark needs inputs whose first dimension is the batch. Got first dimensions "
            f"{[tuple(tensor.shape)[:1] for tensor in given.tensors()]}."
        )
    costs = cost(dense, given), cost(compact, given)
    if fold_bn:
        dense, compact = (fold_batch_norms(model, given) for model in (dense, compact))
    rows = tuple(_row(runtime, {"dense": dense, "compact": compact}, given, repeats, costs) for runtime in runtimes)
    return BenchReport(rows, costs[0].macs, costs[1].macs, advice(rows, compact, costs))


def _row(
    runtime: Runtime, networks: Mapping[str, nn.Module], example: Example, repeats: int, costs: tuple[Cost, Cost]
) -> BenchRow:
    found: dict[str, Any] = {}
    try:
        found |= runtime.time(networks, example, repeats)
    except SoftpruneError as error:
        found["note"] = str(error)
    except Exception as error:  # such as out of memory or an unsupported operator; the other rows are still useful
        found["note"] = f"failed: {type(error).__name__}: {first_line(error)}"
    used = replace(runtime, threads=runtime.threads or torch.get_num_threads())
    return BenchRow(**vars(used), mac_ratio=costs[0].macs / max(costs[1].macs, 1), **found)


def advice(rows: Iterable[BenchRow], compact: nn.Module, costs: tuple[Cost, Cost]) -> tuple[str, ...]:
    """Return a sentence for each likely cause if `compact` is not faster than the dense network.

    Args:
        costs: Costs of the dense and the compact network.
    """
    rows = [row for row in rows if row.speed_up is not None]
    slow = [row for row in rows if row.speed_up is not None and row.speed_up < FASTER]
    plain, depthwise, _ = disliked_widths(compact)
    odd = f"{plain} convolutions and {depthwise} depthwise ones"
    gathers = sum(isinstance(module, Select) for module in compact.modules())
    macs, written = (getattr(costs[1], name) / max(getattr(costs[0], name), 1) for name in ("macs", "activations"))
    larger = {row.batch for row in rows for each in slow if row.backend == each.backend and row.batch > each.batch}
    larger -= {row.batch for row in slow}
    rules = (
        (
            (any(row.on_gpu or row.backend == "onnxruntime" for row in slow) and plain + depthwise)
            or (slow and depthwise),
            f"Widths: {odd} have numbers of channels that are not multiples of {WIDTH_MULTIPLE}, without fast kernels. "
            "Train with `--set method.round_to=auto` or, without a target, cut with `softprune compact RUN --round-to "
            f"{WIDTH_MULTIPLE} --out FILE`.",
        ),
        (
            slow and gathers,
            f"Gathers: {gathers} layers gather their channels from a shared tensor by an index. If the training had "
            "no target, try compact(gathers=False) or `softprune compact RUN --no-gathers --out FILE`.",
        ),
        (
            slow and written > 1.25 * macs,
            f"Memory traffic: {macs:.0%} of the MACs are left, but {written:.0%} of the activations, which layers "
            "write and read. The cause is a wide residual stream: prune its channels too, or whole blocks.",
        ),
        (
            slow and larger,
            f"Batch: it is faster with {', '.join(map(str, sorted(larger)))} images; fewer do not fill the device.",
        ),
        (
            any(row.on_gpu and row.backend == "eager" for row in slow),
            "Launches: on a GPU, kernel launches limit the speed of small networks and batches: try `--backend "
            "compile`, which uses CUDA graphs.",
        ),
    )
    return tuple(sentence for applies, sentence in rules if applies)
