"""Measure dense and compact network under every backend and batch size."""

from collections.abc import Iterable

import torch
from torch import nn

from softprune.bench.backends import BACKENDS, COMPILED, Ready, Setting, cpu_threads
from softprune.bench.results import BenchReport, BenchRow, Timing, advice, alternate, paired_ratio
from softprune.costs import cost
from softprune.errors import ConfigError, SoftpruneError, check_choice, check_types, first_line
from softprune.export import fold_batch_norms
from softprune.graph import Example, ExampleLike
from softprune.hardware import synchronizer
from softprune.log import get_logger
from softprune.masks import check_unmasked

logger = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@check_types
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
        backends: "eager", "graph" (eager as a CUDA graph), "compile", "fused" (compiled with fused convolutions, half
            precision on NVIDIA GPUs) or "onnxruntime".
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
    macs = [cost(model, given).macs for model in (dense, compact)]
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
    return BenchReport(tuple(rows), macs[0], macs[1], advice(rows, compact))


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
    backend: str, ready: tuple[Ready, Ready] | str, example: Example, batch: int, setting: Setting, macs: list[int]
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
        compile_mode=setting.compile_mode if backend in COMPILED else "",
        fold_bn=setting.fold_bn or backend == "fused",
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
    if backend in COMPILED:
        for call in calls.values():
            call()
    return alternate(calls, repeats=setting.repeats, finish=synchronizer(setting.device))
