"""The backends of a benchmark. Each turns a network and an input into a call to be timed."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softprune.cut.apply import duplicated
from softprune.devices import Call, capture_graph
from softprune.errors import ConfigError
from softprune.export import to_onnx
from softprune.export.formats import onnx_calls
from softprune.graph import Example


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a measurement."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    """CPU threads. 0 keeps the present number."""
    channels_last: bool
    compile_mode: str
    fold_bn: bool
    """Whether the BatchNorms of the networks are folded already."""
    repeats: int
    """Timed blocks per network."""


Ready = Callable[[Example], Call]
"""A prepared network: returns the call to be timed for one input."""


def eager(model: nn.Module, example: Example, setting: Setting) -> Ready:
    """Eager PyTorch."""
    return _ready(placed(model, setting, setting.dtype), setting)


def compiled(model: nn.Module, example: Example, setting: Setting) -> Ready:
    """torch.compile, for each shape separately."""
    return _ready(placed(model, setting, setting.dtype), setting, compiling=True)


def graph(model: nn.Module, example: Example, setting: Setting) -> Ready:
    """Eager PyTorch as a CUDA graph: the GPU's own time, without the host's launches."""
    if setting.device.type != "cuda":
        raise ConfigError(
            f"The graph backend needs an NVIDIA GPU. Got {setting.device.type}; take eager or compile there."
        )
    eagerly = eager(model, example, setting)

    def ready(given: Example) -> Call:
        call = eagerly(given)
        captured = capture_graph(call, setting.device, trial=call, undo=lambda: None)

        def replay() -> Call:
            captured.replay()
            return call  # which keeps the input: the graph reads it by its address

        return replay

    return ready


def onnxruntime(model: nn.Module, example: Example, setting: Setting) -> Ready:
    """ONNX Runtime on the CPU, from one file with a dynamic batch size."""
    if setting.device.type != "cpu" or setting.dtype != torch.float32:
        raise ConfigError(
            f"The onnxruntime backend needs the CPU and float32. Got {setting.device.type} and {setting.dtype}."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        to_onnx(model, example, path)
        return onnx_calls(path.read_bytes(), threads=setting.threads)


BACKENDS: dict[str, Callable[[nn.Module, Example, Setting], Ready]] = {
    "eager": eager,
    "graph": graph,
    "compile": compiled,
    "onnxruntime": onnxruntime,
}
"""Backends by their name on the command line."""


def placed(model: nn.Module, setting: Setting, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of `model` in eval mode on the device of the setting, in its own precision or in `dtype`."""
    network = duplicated(model).to(setting.device, dtype).eval()
    if setting.channels_last:
        # 4-D tensors only, because Module.to(memory_format=...) fails for networks with 3-D convolutions.
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.ndim == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return network


def placed_input(example: Example, setting: Setting) -> Example:
    """Return the input on the device, in the precision and in the memory format of the setting."""
    order = torch.channels_last if setting.channels_last else torch.contiguous_format

    def place(tensor: Tensor) -> Tensor:
        moved = tensor.to(setting.device, setting.dtype if tensor.is_floating_point() else None)
        return moved.contiguous(memory_format=order) if tensor.ndim == 4 else moved

    return example.map(place)


def _compile(network: nn.Module, setting: Setting) -> Callable[..., object]:
    if setting.device.type == "cuda" and not setting.channels_last:
        # Otherwise the compiler converts convolutions to channels_last, which is slower for large float32 batches.
        options = torch._inductor.list_mode_options(setting.compile_mode) | {"layout_optimization": False}
        return torch.compile(network, dynamic=False, options=options)
    return torch.compile(network, dynamic=False, mode=setting.compile_mode)


def _ready(network: nn.Module, setting: Setting, *, compiling: bool = False) -> Ready:
    def ready(example: Example) -> Call:
        forward = _compile(network, setting) if compiling else network
        given = placed_input(example, setting)

        def call() -> object:
            with torch.inference_mode():
                return forward(*given.args, **given.kwargs)

        return call

    return ready


@contextmanager
def cpu_threads(number: int) -> Iterator[int]:
    """Set the CPU threads of PyTorch for the block (0: keep them) and return the number in use."""
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
