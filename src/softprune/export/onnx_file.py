"""ONNX: the network as a file for ONNX Runtime, TensorRT, OpenVINO and others."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError
from softprune.export.checking import compare, prepared, trials
from softprune.export.folding import count_batch_norms, fold_batch_norms
from softprune.export.report import ExportReport
from softprune.export.shapes import dynamic_shapes, exportable, refused
from softprune.export.torch_file import checked_path, folder_beside
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
    target = checked_path(path, ".onnx")
    network = prepared(model)
    norms = count_batch_norms(network)
    given = exportable(network, Example.of(example).to_model(network), dynamic_batch=dynamic_batch)
    small = fold_batch_norms(network, given) if fold_bn else network
    with folder_beside(target) as folder:
        written = folder / target.name
        _write(small, given, written, dynamic_batch, opset)
        try:
            session = open_session(written)
        except Exception as error:  # of ONNX Runtime, which has a class for every failure
            raise refused(small, error) from error
        attempts = trials(given, other_batch=dynamic_batch)
        comparison = compare(
            network,
            lambda attempt: run_session(session, attempt),
            attempts,
            what="an ONNX file",
            tolerance=tolerance,
        )
        size = written.stat().st_size
        os.replace(written, target)
    return ExportReport(
        path=target,
        format="onnx",
        bytes=size,
        runtime=f"onnxruntime {runtime.__version__}",
        max_difference=comparison.max_difference,
        scale=comparison.scale,
        inputs=comparison.inputs,
        folded=norms - count_batch_norms(small),
    )


def require(package: str) -> Any:
    """A package of the "onnx" extra, or an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f'ONNX needs the packages of the "onnx" extra. Got no {package}; pip install "softprune[onnx]".'
        ) from error


def open_session(path: Path, *, threads: int = 0) -> Any:
    """An ONNX Runtime session on the CPU; `threads` 0 is its own choice."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_session(session: Any, example: Example) -> list[Tensor]:
    """The outputs of a session on the tensors of `example`, which are its inputs in order."""
    names = [entry.name for entry in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, example.tensors(), strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def _write(model: nn.Module, given: Example, path: Path, dynamic_batch: bool, opset: int | None) -> None:
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                given.args,
                path,
                kwargs=given.kwargs,
                dynamo=True,
                external_data=False,
                dynamic_shapes=dynamic_shapes(model, given, dynamic_batch=dynamic_batch),
                opset_version=opset,
                verbose=False,
            )
    except Exception as error:
        raise refused(model, error) from error
    finally:
        exporter_log.setLevel(level)
