"""The ATen operators of a module: from the recorder, or from torch.export where the recorder does not take it."""

import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from softprune.errors import ModelError, first_line
from softprune.graph.example import Example, ExampleLike, leaves_of
from softprune.graph.recorder import PLAIN, PROCESS_WIDE, TORCH, record
from softprune.log import get_logger
from softprune.module_state import attributes_kept, evaluating, modes_kept

logger = get_logger(__name__)

ANALYSIS_BATCH = 13
"""Batch size of the analysis: not 1, so that squeezing and broadcasting cannot hide the batch dimension; and a prime
that sizes are seldom multiples of, since a count that it divides is taken to grow with the batch."""


@dataclass(frozen=True)
class Capture:
    """The operators of one forward pass."""

    nodes: list[Node]
    parameters: dict[str, str]
    """Placeholder name -> parameter or buffer name in the model."""
    training: bool
    example: Example
    rebatched: bool
    """Whether the example was brought to the analysis' batch size: the model then takes any."""

    def used_parameters(self) -> set[str]:
        """Names of the parameters and buffers that some operator reads."""
        return {
            self.parameters[node.name]
            for node in self.nodes
            if node.op == "placeholder" and node.name in self.parameters and node.users
        }

    def unused_parameters(self, model: nn.Module) -> set[str]:
        """Names of the model's parameters that no operator reads, under any of the names that a tied one has."""
        every = dict(model.named_parameters(remove_duplicate=False))
        used = {id(every[name]) for name in self.used_parameters() if name in every}
        return {name for name, parameter in model.named_parameters() if id(parameter) not in used}


class _Muted:
    """Stands for stderr: drops what the thread that made it writes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        drops = self._stream is None or threading.get_ident() == self._thread
        return len(text) if drops else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute torch in this thread: it writes graphs and tracebacks to stderr where it fails; `_explain` says why."""
    thread = threading.get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] != "torch" or threading.get_ident() != thread

    known = [*logging.root.manager.loggerDict.values()]  # other threads may add to it
    loggers = [logging.root, *(each for each in known if isinstance(each, logging.Logger))]
    handlers = {handler for each in loggers for handler in (*each.handlers, logging.lastResort) if handler is not None}
    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        with PROCESS_WIDE, warnings.catch_warnings(), redirect_stderr(_Muted(sys.stderr)):  # type: ignore[type-var]
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)


def _export(model: nn.Module, example: Example) -> torch.export.ExportedProgram:
    # torch.export leaves tensors without data where forward() stores tensors on modules.
    with _quiet(), attributes_kept(model), torch.no_grad():
        return torch.export.export(model, example.args, example.kwargs, strict=False)


def _capture(model: nn.Module, example: Example, *, training: bool, rebatched: bool) -> Capture:
    with modes_kept(model):
        model.train(training)
        try:
            with _quiet():
                nodes, parameters = record(model, example)
            return Capture(nodes, parameters, training, example, rebatched)
        except Exception:
            logger.debug("the recorder does not take the network; torch.export is asked", exc_info=True)
        program = _export(model, example)
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    parameters = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind in kinds and spec.target is not None
    }
    return Capture(list(program.graph.nodes), parameters, training, example, rebatched)


def capture(model: nn.Module, example: ExampleLike) -> list[Capture]:
    """The operators of `model` in eval mode, and in train mode too where that one reads more parameters.

    Nothing is computed (shapes only) and the model is left as it was. Networks with auxiliary training heads
    (GoogLeNet, Inception) have two graphs; all others one.
    """
    given = Example.of(example).to_model(model)
    attempts = [(given, False)]
    if given.batch_size() is not None:
        attempts.insert(0, (given.with_batch(ANALYSIS_BATCH), True))
    for attempt, rebatched in attempts:
        try:
            evaluation = _capture(model, attempt, training=False, rebatched=rebatched)
            break
        except Exception as error:
            failure = error
    else:
        raise _explain(model, given, failure) from failure
    captures = [evaluation]
    if evaluation.unused_parameters(model):
        try:
            training = _capture(model, evaluation.example, training=True, rebatched=rebatched)
        except Exception as error:
            logger.info("the train-mode graph could not be exported (%s); the eval graph alone is analysed", error)
        else:
            if training.used_parameters() - evaluation.used_parameters():
                captures.append(training)
    return captures


def _explain(model: nn.Module, example: Example, failure: Exception) -> ModelError:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in example.tensors())
    given = f"tensors of shape {shapes}" if shapes else f"no tensor among {example.args!r} and {example.kwargs!r}"
    try:
        with evaluating(model), torch.no_grad():
            output = model(*example.args, **example.kwargs)
    except Exception as error:
        return ModelError(
            f"the model must accept `example`. Got {given}, and calling "
            f"{type(model).__name__} on them raised {type(error).__name__}: {first_line(error)}. "
            f"{_unprunable(model) or 'Pass an example that model(example) accepts.'}"
        )
    other = {type(leaf).__name__ for leaf in leaves_of(output) if not isinstance(leaf, (Tensor, *PLAIN))}
    if other:
        return ModelError(
            "a network must return tensors, alone or in tuples, lists, dicts or dataclasses. Got "
            f"{', '.join(sorted(other))} from {type(model).__name__}; wrap it in a module that returns its tensors."
        )
    remedy = _unprunable(model) or (
        "Data-dependent Python in forward() is the usual cause; prune the part that exports (for detection models: "
        "model.backbone)."
    )
    return ModelError(
        "softprune reads networks through torch.export, and torch.export refuses "
        f"{type(model).__name__}{_place(failure)}: {type(failure).__name__}: {first_line(failure)}. {remedy}"
    )


def _unprunable(model: nn.Module) -> str | None:
    """Return what to do about a network that was converted to a program or to integers, of which nothing can be cut."""
    # torch.export's program is a GraphModule with methods of its own in place of train() and eval().
    if isinstance(model, torch.fx.GraphModule) and "eval" in model.__dict__:
        return "An exported program cannot be pruned; pass the network that was exported."
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return "TorchScript cannot be pruned; pass the network that was scripted or traced."
        if ".quantized." in type(module).__module__:
            return "A quantised network cannot be pruned; prune it first, then quantise the compact network."
    return None


def _place(failure: Exception) -> str:
    """Return the line of the model's own forward() in which tracing failed, if there is one."""
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame for frame in frames if frame.name == "forward" and not frame.filename.startswith(TORCH)]
    return f" at {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`" if own else ""
