"""ONNX: the network as a file for ONNX Runtime, TensorRT, OpenVINO and others."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.export.report import ExportReport
from softprune.export.shapes import dynamic_shapes
from softprune.export.writing import Format, Runtime, write_checked
from softprune.graph import Example, ExampleLike


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
    """Write `model` as one ONNX file, run it in ONNX Runtime and compare it with `model`.

    Args:
        model: A compact network, or any other without masks; left as it was.
        example: What it is called with: a tensor, a tuple of arguments, or (args, kwargs).
        path: The file to write, ending in .onnx; an earlier one is replaced only by a file that passed the check.
        fold_bn: First fold BatchNorms into the layers before them.
        dynamic_batch: Leave the batch size free.
        opset: Version of the ONNX operators; the exporter's own choice by default.
        tolerance: Largest difference allowed, relative to the largest output. [1e-4 in float32]
    """
    runtime = require("onnxruntime")
    require("onnx")
    require("onnxscript")
    kind = Format(
        suffix="onnx",
        what="an ONNX file",
        runtime=f"onnxruntime {runtime.__version__}",
        content=lambda network, given: _content(network, given, dynamic_batch, opset),
        open=_open,
    )
    return write_checked(
        kind, model, example, path, fold_bn=fold_bn, dynamic_batch=dynamic_batch, tolerance=tolerance
    )


def require(package: str) -> Any:
    """A package of the "onnx" extra, or an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f'ONNX needs the packages of the "onnx" extra. Got no {package}; pip install "softprune[onnx]".'
        ) from error


def open_session(file: Path | bytes, *, threads: int = 0) -> Any:
    """An ONNX Runtime session of a file, or of its content, on the CPU; `threads` 0 is its own choice."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    source = file if isinstance(file, bytes) else str(file)
    return runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_session(session: Any, example: Example) -> list[Tensor]:
    """The outputs of a session on the tensors of `example`, which are its inputs in order."""
    names = [entry.name for entry in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, example.tensors(), strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def _open(content: bytes) -> Runtime:
    session = open_session(content)
    return lambda attempt: run_session(session, attempt)


def _content(model: nn.Module, given: Example, dynamic_batch: bool, opset: int | None) -> bytes:
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        program = torch.onnx.export(
            model,
            given.args,
            kwargs=given.kwargs,
            dynamo=True,
            dynamic_shapes=dynamic_shapes(model, given, dynamic_batch=dynamic_batch),
            opset_version=opset,
            verbose=False,
        )
    finally:
        exporter_log.setLevel(level)
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content
