"""The ways to run a network that a benchmark knows; each turns a network and its input into a call to be timed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.export import to_onnx
from softprune.export.onnx_file import open_session
from softprune.fused.inference import fuse
from softprune.fused.inference.operator import has_kernel
from softprune.graph import Example
from softprune.hardware import Call
from softprune.surgery.apply import duplicated


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a measurement is made under."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    """CPU threads; 0 leaves them as they are."""
    channels_last: bool
    compile_mode: str
    fold_bn: bool
    """Whether the networks came here folded."""


Ready = Callable[[Example], Call]
"""A network made ready to run: gives the call to be timed for one input."""


def eager(model: nn.Module, example: Example, setting: Setting) -> Ready:
    """PyTorch as it is."""
    network = placed(model, setting)
    return lambda given: _caller(network, placed_input(given, setting))


def compiled(model: nn.Module, example: Example, setting: Setting) -> Ready:
    """torch.compile, anew for every shape."""
    network = placed(model, setting)
    return lambda given: _caller(_compile(network, setting), placed_input(given, setting))


def fused(model: nn.Module, example: Example, setting: Setting) -> Ready:
    """torch.compile of the network whose convolutions do what follows them (`softprune.fused.inference.fuse`)."""
    if not has_kernel(setting.device, setting.dtype):
        raise ConfigError(
            f"fused networks are measured on NVIDIA GPUs in half precision. Got {setting.device.type} and "
            f"{setting.dtype}."
        )
    # From full precision, so that weights are rounded once.
    network = duplicated(model).to(setting.device)
    if setting.channels_last:
        _to_channels_last(network)
    network = fuse(network, example, dtype=setting.dtype)
    return lambda given: _caller(_compile(network, setting), placed_input(given, setting))


def onnxruntime(model: nn.Module, example: Example, setting: Setting) -> Ready:
    """ONNX Runtime on the CPU, from one file whose batch size is free."""
    if setting.device.type != "cpu" or setting.dtype != torch.float32:
        raise ConfigError(
            f"ONNX Runtime is measured on the CPU in float32. Got {setting.device.type} and {setting.dtype}."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        to_onnx(model, example, path)
        session = open_session(path, threads=setting.threads)
    names = [entry.name for entry in session.get_inputs()]

    def ready(given: Example) -> Call:
        feed = {name: tensor.cpu().numpy() for name, tensor in zip(names, given.tensors(), strict=True)}
        return lambda: session.run(None, feed)

    return ready


BACKENDS: dict[str, Callable[[nn.Module, Example, Setting], Ready]] = {
    "eager": eager,
    "compile": compiled,
    "fused": fused,
    "onnxruntime": onnxruntime,
}
"""By the name that the command line takes."""
COMPILED = ("compile", "fused")
"""Those that compile at the first call."""


def placed(model: nn.Module, setting: Setting) -> nn.Module:
    """A copy of `model` in eval mode, where and in the precision that the setting wants."""
    network = duplicated(model).to(setting.device, setting.dtype).eval()
    if setting.channels_last:
        _to_channels_last(network)
    return network


def _to_channels_last(network: nn.Module) -> None:
    """Weights of images alone: torch's own way stumbles over a network with volumes, too."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def placed_input(example: Example, setting: Setting) -> Example:
    """The input where, and in the precision and memory order, that the setting wants."""
    order = torch.channels_last if setting.channels_last else torch.contiguous_format

    def place(tensor: Tensor) -> Tensor:
        moved = tensor.to(setting.device, setting.dtype if tensor.is_floating_point() else None)
        return moved.contiguous(memory_format=order) if tensor.ndim == 4 else moved

    return example.map(place)


def _compile(network: nn.Module, setting: Setting) -> Callable[..., object]:
    if setting.device.type == "cuda" and not setting.channels_last:
        # By itself the compiler turns convolutions to channels last, which large batches in float32 are slower in.
        options = torch._inductor.list_mode_options(setting.compile_mode) | {"layout_optimization": False}
        return torch.compile(network, dynamic=False, options=options)
    return torch.compile(network, dynamic=False, mode=setting.compile_mode)


def _caller(network: Callable[..., object], given: Example) -> Call:
    def call() -> object:
        with torch.inference_mode():
            return network(*given.args, **given.kwargs)

    return call


@contextmanager
def cpu_threads(number: int) -> Iterator[int]:
    """PyTorch with `number` CPU threads (0: as it is), and as before afterwards; gives the number in force."""
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
