"""Time dense and compact network in turns under every backend and batch size, and name what makes a network slow."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from softprune.bench.backends import BACKENDS, Ready, Setting, cpu_threads
from softprune.costs import Cost, cost
from softprune.devices import Call, seconds, synchronizer
from softprune.errors import ConfigError, SoftpruneError, check_choice, first_line
from softprune.export import fold_batch_norms
from softprune.export.writing import WIDTH_MULTIPLE, odd_widths
from softprune.graph import Example, ExampleLike
from softprune.graph.modules import Select
from softprune.log import get_logger
from softprune.masks import check_unmasked

logger = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
BLOCK_SECONDS = 0.02
"""Approximate length of a timed block. Shorter blocks measure the clock."""
MOST_CALLS = 1000


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over several blocks."""

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
    calls: Mapping[str, Call],
    *,
    repeats: int = 15,
    warm_up: int = 3,
    finish: Call = lambda: None,
    block_seconds: float = BLOCK_SECONDS,
) -> dict[str, Timing]:
    """Time every call, after `warm_up` untimed ones, in `repeats` blocks in turns: A B, B A, A B, ...

    `finish` is called before the clock is read, to synchronise with a GPU.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    # The same number of calls per block for all, so that a fixed cost per block has the same weight.
    slowest = max(seconds(call, 1, finish) for call in calls.values())
    number = min(max(int(block_seconds / max(slowest, 1e-9)), 1), MOST_CALLS)
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(repeats):
        for name in order:
            blocks[name].append(1000 * seconds(calls[name], number, finish) / number)
        order.reverse()
    return {name: Timing(tuple(values)) for name, values in blocks.items()}


def paired_ratio(slow: Timing, fast: Timing) -> tuple[float, float, float]:
    """Return median, lower and upper quartile of the ratio slow / fast of neighbouring blocks."""
    ratios = Timing(tuple(a / b for a, b in zip(slow.blocks, fast.blocks, strict=True)))
    return ratios.median, *ratios.spread


FASTER = 1.03
"""A speed-up below this is none; the difference may be noise."""


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Dense against compact under one backend and batch size."""

    backend: str
    device: str
    dtype: str
    batch: int
    threads: int
    channels_last: bool
    compile_mode: str
    """The mode of torch.compile, empty for backends that do not compile."""
    fold_bn: bool
    """Whether BatchNorms were folded into the layers before them, in both networks."""
    dense: Timing | None
    compact: Timing | None
    speed_up: float | None
    """Dense time over compact time, the median over neighbouring blocks."""
    speed_up_spread: tuple[float, float] | None
    mac_ratio: float
    """Dense MACs over compact MACs, the speed-up if time were proportional to MACs."""
    note: str = ""
    """Why there is no measurement."""

    @property
    def realised(self) -> float | None:
        """Speed-up over MAC ratio: 1 where the whole MAC reduction becomes speed-up."""
        return None if self.speed_up is None else self.speed_up / self.mac_ratio

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON record."""
        values = asdict(self) | {"realised": self.realised}
        values["speed_up_spread"] = self.speed_up_spread and [*self.speed_up_spread]
        for side in ("dense", "compact"):
            timing: Timing | None = getattr(self, side)
            values[side] = timing and {
                "median_ms": timing.median,
                "low_ms": timing.spread[0],
                "high_ms": timing.spread[1],
                "blocks": len(timing.blocks),
            }
        return values


@dataclass(frozen=True)
class BenchReport:
    """The rows of a latency comparison. Prints as a table."""

    rows: tuple[BenchRow, ...]
    dense_macs: int
    compact_macs: int
    advice: tuple[str, ...] = ()
    """Likely causes, and what to try, where the compact network was not faster."""

    def __str__(self) -> str:
        lines = [
            f"MACs per input: {self.dense_macs:,} dense, {self.compact_macs:,} compact",
            f"{'backend':<12} {'device':<5} {'dtype':<9} {'batch':>5}  {'dense':<28} {'compact':<28} "
            f"{'speed-up':<22} realised",
        ]
        for row in self.rows:
            head = f"{row.backend:<12} {row.device:<5} {row.dtype:<9} {row.batch:>5}  "
            if row.speed_up is None or row.speed_up_spread is None or row.realised is None:
                lines.append(head + row.note)
                continue
            low, high = row.speed_up_spread
            faster = f"{row.speed_up:.2f} ({low:.2f} to {high:.2f})"
            lines.append(f"{head}{row.dense!s:<28} {row.compact!s:<28} {faster:<22} {row.realised:.2f}")
        return "\n".join([*lines, *self.advice])

    __repr__ = __str__  # what a notebook shows


def advice(rows: Iterable[BenchRow], compact: nn.Module, costs: tuple[Cost, Cost]) -> tuple[str, ...]:
    """Return a sentence for each likely cause where `compact` was not faster than the dense network.

    Args:
        costs: Of the dense and the compact network.
    """
    rows = [row for row in rows if row.speed_up is not None]
    slow = [row for row in rows if row.speed_up is not None and row.speed_up < FASTER]
    on_gpu = [row for row in slow if row.device == "cuda"]
    odd, odd_depthwise = odd_widths(compact)
    gathers = sum(isinstance(module, Select) for module in compact.modules())
    macs, written = (getattr(costs[1], name) / max(getattr(costs[0], name), 1) for name in ("macs", "activations"))
    larger = {row.batch for row in rows for each in slow if row.backend == each.backend and row.batch > each.batch}
    larger -= {row.batch for row in slow}
    rules = (
        (
            on_gpu and odd,
            f"Widths: {odd} convolutions have widths that are no multiples of {WIDTH_MULTIPLE}, which a GPU pads. "
            f"`--round-to {WIDTH_MULTIPLE}` (or 16, 32) shows what multiples gain; then train with "
            "`--set method.round_to=auto` or, without a target, cut with `softprune compact RUN --round-to "
            f"{WIDTH_MULTIPLE} --out FOLDER`.",
        ),
        (
            odd_depthwise and len(on_gpu) < len(slow),
            f"Depthwise widths: {odd_depthwise} depthwise convolutions have widths that are no multiples of "
            f"{WIDTH_MULTIPLE}, for which CPU runtimes have no fast kernels: try `--round-to {WIDTH_MULTIPLE}` or 16.",
        ),
        (
            slow and gathers,
            f"Gathers: {gathers} layers read their channels of a shared stream through an index. If the training had "
            "no target, try compact(gathers=False) or `softprune compact RUN --no-gathers --out FOLDER`.",
        ),
        (
            slow and written > 1.25 * macs,
            f"Memory traffic: {macs:.0%} of the MACs are left, but {written:.0%} of the activations, which layers "
            "write and read. Wide streams cause it: prune their channels, too, or whole blocks.",
        ),
        (
            slow and larger,
            f"Batch: it is faster at {', '.join(map(str, sorted(larger)))} images; fewer do not fill the device.",
        ),
        (
            any(
                row.device == "cuda" and row.compile_mode in ("", "default") and row.backend != "graph" for row in slow
            ),
            "Launches: on a GPU the host's launches limit small networks and batches: try "
            "`--backend compile --compile-mode reduce-overhead`, which uses CUDA graphs.",
        ),
    )
    return tuple(sentence for applies, sentence in rules if applies)


def compare_latency(
    dense: nn.Module,
    compact: nn.Module,
    example: ExampleLike,
    *,
    backends: Iterable[str] = ("eager",),
    batches: Iterable[int] | int = (1,),
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    threads: int = 0,
    channels_last: bool = False,
    compile_mode: str = "default",
    fold_bn: bool = False,
    repeats: int = 15,
) -> BenchReport:
    """Time `dense` and `compact` in turns on this machine.

    Args:
        dense: The network before pruning. Its weights do not matter.
        compact: The network after pruning.
        example: An input of both: a tensor, a tuple of arguments, or (args, kwargs).
        backends: "eager", "graph" (eager as a CUDA graph), "compile" or "onnxruntime".
        batches: Batch sizes. The example is repeated to fill them.
        device: The device to measure on.
        dtype: Precision of weights and inputs: "float32", "bfloat16", "float16" or "float64".
        threads: CPU threads. 0 keeps the present number.
        channels_last: Use the channels_last memory format. Otherwise compiled networks on a GPU stay contiguous, too.
        compile_mode: The mode of torch.compile. "reduce-overhead" uses CUDA graphs, which small batches need.
        fold_bn: Fold BatchNorms into the layers before them, in both networks.
        repeats: Timed blocks per network.
    """
    chosen = [backends] if isinstance(backends, str) else [*backends]
    for name in chosen:
        check_choice("A backend", name, BACKENDS)
    check_choice("`dtype`", dtype, DTYPES)
    check_choice("`compile_mode`", compile_mode, COMPILE_MODES)
    if repeats < 1:
        raise ConfigError(f"`repeats` must be an integer of at least 1. Got {repeats!r}.")
    if threads < 0:
        raise ConfigError(f"`threads` must be an integer of at least 0 (0: keep the present number). Got {threads!r}.")
    sizes = [*batches] if isinstance(batches, Iterable) else [batches]
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ConfigError(f"`batches` must be integers of at least 1. Got {batches!r}.")
    where = _device(device)
    for name, model in (("dense", dense), ("compact", compact)):
        check_unmasked(model, "a benchmark", name=name)
    given = Example.of(example)
    if given.batch_size() is None:
        raise ConfigError(
            "A benchmark needs inputs whose first dimension is the batch. Got first dimensions "
            f"{[tuple(tensor.shape)[:1] for tensor in given.tensors()]}."
        )
    costs = cost(dense, given), cost(compact, given)
    macs = costs[0].macs, costs[1].macs
    if fold_bn:
        dense, compact = (fold_batch_norms(model, given) for model in (dense, compact))
    rows = []
    with cpu_threads(threads) as used:
        setting = Setting(
            device=where,
            dtype=DTYPES[dtype],
            threads=used,
            channels_last=channels_last,
            compile_mode=compile_mode,
            fold_bn=fold_bn,
            repeats=repeats,
        )
        for backend in chosen:
            ready = _prepared(backend, (dense, compact), given, setting)
            for batch in sizes:
                row = _row(backend, ready, given, batch, setting, macs)
                logger.debug("%s, batch %d: speed-up %s", backend, batch, row.speed_up or row.note)
                rows.append(row)
    return BenchReport(tuple(rows), *macs, advice(rows, compact, costs))


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except Exception as error:
        raise ConfigError(
            f"`device` must be available in PyTorch, such as 'cpu' or 'cuda'. Got {str(device)!r}: {first_line(error)}."
        ) from error
    return found


def _prepared(
    backend: str, models: tuple[nn.Module, nn.Module], example: Example, setting: Setting
) -> tuple[Ready, Ready] | str:
    """Return both networks prepared, or the reason why this backend cannot run them."""
    make = BACKENDS[backend]
    try:
        return make(models[0], example, setting), make(models[1], example, setting)
    except SoftpruneError as error:
        return str(error)


def _row(
    backend: str,
    ready: tuple[Ready, Ready] | str,
    example: Example,
    batch: int,
    setting: Setting,
    macs: tuple[int, int],
) -> BenchRow:
    timings: dict[str, Timing] = {}
    note = ready if isinstance(ready, str) else ""
    if not isinstance(ready, str):
        try:
            timings = _timed(backend, ready, example.with_batch(batch), setting)
        except Exception as error:  # of the network, the backend or the memory; the other rows are still useful
            note = f"does not run: {type(error).__name__}: {first_line(error)}"
    speed_up = paired_ratio(timings["dense"], timings["compact"]) if timings else None
    return BenchRow(
        backend=backend,
        device=setting.device.type,
        dtype=str(setting.dtype).removeprefix("torch."),
        batch=batch,
        threads=setting.threads,
        channels_last=setting.channels_last,
        compile_mode=setting.compile_mode if backend == "compile" else "",
        fold_bn=setting.fold_bn,
        dense=timings.get("dense"),
        compact=timings.get("compact"),
        speed_up=speed_up and speed_up[0],
        speed_up_spread=speed_up and speed_up[1:],
        mac_ratio=macs[0] / max(macs[1], 1),
        note=note,
    )


def _timed(backend: str, ready: tuple[Ready, Ready], example: Example, setting: Setting) -> dict[str, Timing]:
    # Each row compiles for its own shapes, without reaching the limit of recompilations.
    torch.compiler.reset()
    calls = {"dense": ready[0](example), "compact": ready[1](example)}
    # The first call lets cuDNN choose algorithms, which the compiled networks reuse.
    with torch.compiler.set_stance("force_eager"):
        for call in calls.values():
            call()
    if backend == "compile":
        for call in calls.values():
            call()
    return alternate(calls, repeats=setting.repeats, finish=synchronizer(setting.device))
