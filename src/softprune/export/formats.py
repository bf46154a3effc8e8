"""The two file formats: ONNX for ONNX Runtime, TensorRT or OpenVINO, and .pt2 for torch.export and AOTInductor."""

import io
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from softprune.cut.verify import outputs_of
from softprune.errors import ModelError, import_optional
from softprune.export.writing import ExportReport, Format, Runtime, dynamic_shapes, exported, write_checked
from softprune.graph import Example, ExampleLike

_PACKAGES = "onnx onnxscript onnxruntime"


def to_onnx(
    model: nn.Module,
    example: ExampleLike,
    path: str | os.PathLike[str],
    *,
    fold_bn: bool = False,
    dynamic_batch: bool = True,
    opset: int | None = None,
    tolerance: float | None = None,
) -> ExportReport:
    """Write `model` as one ONNX file, run it in ONNX Runtime and compare its outputs with those of `model`.

    Args:
        model: A network without masks, such as a compact network. It is not changed.
        example: An input: a tensor, a tuple of arguments, or (args, kwargs).
        path: The file to write, ending in .onnx. An existing file is replaced only by a verified one.
        fold_bn: Fold BatchNorms into the layers before them.
        dynamic_batch: Accept any batch size.
        opset: Version of the ONNX operators. Default: the choice of the exporter.
        tolerance: Largest allowed difference relative to the largest output. Default: 1e-4 in float32.
    """
    _, _, runtime = (import_optional(name, "ONNX", _PACKAGES) for name in _PACKAGES.split())
    kind = Format(
        suffix="onnx",
        what="An ONNX file",
        runtime=f"onnxruntime {runtime.__version__}",
        content=lambda network, given: _onnx_content(network, given, dynamic_batch, opset),
        open=_open_onnx,
    )
    return write_checked(kind, model, example, path, fold_bn=fold_bn, dynamic_batch=dynamic_batch, tolerance=tolerance)


def onnx_calls(content: bytes, *, threads: int = 0) -> Callable[[Example], Callable[[], Any]]:
    """Open the content of a file in ONNX Runtime on the CPU; return what makes the call for an input.

    With `threads` 0 the runtime decides.
    """
    runtime = import_optional("onnxruntime", "ONNX", _PACKAGES)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def call_for(example: Example) -> Callable[[], Any]:
        feed = {name: tensor.cpu().numpy() for name, tensor in zip(names, example.tensors(), strict=True)}
        return lambda: session.run(None, feed)

    return call_for


def _open_onnx(content: bytes) -> Runtime:
    call_for = onnx_calls(content)
    return lambda attempt: [torch.from_numpy(output) for output in call_for(attempt)()]


def _onnx_content(model: nn.Module, given: Example, dynamic_batch: bool, opset: int | None) -> bytes:
    outputs = pytree.tree_leaves(model(*given.args, **given.kwargs))
    other = {type(each).__name__ for each in outputs if not isinstance(each, Tensor | None)}
    if other:
        raise ModelError(
            f"An ONNX file has tensors as outputs. Got {', '.join(sorted(other))} among those of "
            f"{type(model).__name__}; export a module that returns its tensors alone."
        )
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        program = torch.onnx.export(
            model,
            (*given.args, given.kwargs),  # an argument that is a dict would be taken for the keywords if it were last
            dynamo=True,
            dynamic_shapes=dynamic_shapes(model, given, dynamic_batch=dynamic_batch),
            opset_version=opset,
            verbose=False,
        )
    finally:
        exporter_log.setLevel(level)
    assert program is not None
    return program.model_proto.SerializeToString()


def to_torch_export(
    model: nn.Module,
    example: ExampleLike,
    path: str | os.PathLike[str],
    *,
    fold_bn: bool = False,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
) -> ExportReport:
    """Write `model` as a torch.export file, load it and compare its outputs with those of `model`.

    Args:
        path: The file to write, ending in .pt2. It is for the CPU. The other arguments are those of :func:`to_onnx`.
    """
    kind = Format(
        suffix="pt2",
        what="A .pt2 file",
        runtime=f"torch.export {torch.__version__}",
        content=lambda network, given: _pt2_content(exported(network, given, dynamic_batch=dynamic_batch)),
        open=_open_pt2,
    )
    return write_checked(kind, model, example, path, fold_bn=fold_bn, dynamic_batch=dynamic_batch, tolerance=tolerance)


def _pt2_content(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _open_pt2(content: bytes) -> Runtime:
    loaded = torch.export.load(io.BytesIO(content)).module()
    return lambda attempt: outputs_of(loaded, attempt)
