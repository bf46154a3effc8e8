"""A network or an example that cannot be read: the error says where and what to pass instead, in a sentence."""

import logging
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from topologies import TOPOLOGIES, Chain
from torch import Tensor, nn

import softprune as sp
from softprune.cut.comparison import outputs_of
from softprune.errors import ModelError
from softprune.graph import Example
from softprune.graph.capture import _quiet

CHAIN = TOPOLOGIES["chain"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(x)) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("wrap", "name", "inner"),
    [
        (nn.DataParallel, "DataParallel", "module"),
        (lambda network: torch.compile(network, backend="eager"), "OptimizedModule", "_orig_mod"),
    ],
)
def test_a_wrapped_network_is_refused_with_what_to_pass(wrap: Any, name: str, inner: str) -> None:
    wrapped = wrap(CHAIN.build())
    for call in (sp.inspect, sp.SoftPruner):
        with pytest.raises(ModelError, match=rf"itself, not a wrapper. Got {name}; pass model\.{inner},"):
            call(wrapped, CHAIN.example())
    assert sp.SoftPruner(getattr(wrapped, inner), CHAIN.example()).sites


def test_ddp_is_refused_with_what_to_pass() -> None:
    class Wrapper(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    with pytest.raises(ModelError, match=r"not a wrapper. Got Wrapper; pass model\.module, and wrap or compile"):
        sp.inspect(Wrapper(CHAIN.build()), CHAIN.example())


def test_the_line_that_cannot_be_traced_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"refuses Branching at .*test_capture\.py:\d+, `return torch\.relu"):
        sp.inspect(Branching(), torch.randn(2, 3, 8, 8))
    assert capfd.readouterr() == ("", ""), "torch's dumps of the graph are left out"


def test_logs_and_warnings_are_as_before_after_a_failure() -> None:
    before = logging.root.manager.disable, list(warnings.filters)
    with pytest.raises(ModelError):
        sp.inspect(Branching(), torch.randn(2, 3, 8, 8))
    assert (logging.root.manager.disable, list(warnings.filters)) == before


def test_torch_is_muted_in_its_own_thread_alone(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def speak(where: str) -> None:
        logging.getLogger("torch.export").error("torch %s", where)
        logging.getLogger("mine").error("mine %s", where)
        print(f"stderr {where}", file=sys.stderr)

    with _quiet():
        speak("here")
        other = threading.Thread(target=speak, args=("elsewhere",))
        other.start()
        other.join()
    speak("afterwards")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["mine here", "torch elsewhere", "mine elsewhere", "torch afterwards", "mine afterwards"]
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stderr")]
    assert printed == ["stderr elsewhere", "stderr afterwards"]


def test_networks_are_read_in_several_threads_at_once() -> None:
    before = sys.stderr, list(warnings.filters), [*logging.root.handlers[0].filters]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: sp.inspect(CHAIN.build(), CHAIN.example()), range(8))]
    assert {each.macs for each in found} == {found[0].macs}
    assert (sys.stderr, list(warnings.filters), logging.root.handlers[0].filters) == before


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"x": torch.zeros(2, 3, 9, 9)}, r"Got dict.*\(\(\), {'pixel_values': image}\) for keywords, or \(batch,\)"),
        ((2, 3, 9, 9), r"Got no tensor among \(2, 3, 9, 9\) and {}, and calling"),
    ],
)
def test_an_example_of_the_wrong_kind_says_which_to_pass(example: object, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        sp.inspect(CHAIN.build(), example)


class Quantised(Branching):
    """A change to integers stands in every statically quantised network."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.ao.nn.quantized.Quantize(0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("convert", "remedy"),
    [
        (lambda model: torch.jit.trace(model, CHAIN.example()), "pass the network that was scripted or traced"),
        (lambda model: torch.export.export(model, (CHAIN.example(),)).module(), "pass the network that was exported"),
        (lambda model: Quantised(), "prune it first, then quantise the compact network"),
    ],
    ids=["traced", "exported", "quantised"],
)
def test_a_converted_network_is_refused_with_what_to_pass(convert: Any, remedy: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = convert(CHAIN.build().eval())
    with pytest.raises(ModelError, match=f"cannot be pruned; {remedy}"):
        sp.inspect(model, CHAIN.example())


@dataclass
class Found:
    logits: Tensor
    note: Any = None


class Returning(Chain):
    """A network whose logits are returned in an object."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return "chain", self.kind(logits=super().forward(x))


@pytest.mark.parametrize("kind", [Found, type("Dict", (dict,), {})])
def test_outputs_in_dataclasses_and_other_dicts_are_read_and_compared(kind: Any) -> None:
    torch.manual_seed(0)
    model = Returning(kind)
    pruner = sp.SoftPruner(model, CHAIN.example())
    with torch.no_grad():
        model.bn1.weight[:4], model.bn1.bias[:4] = 0.1, -3.0
    compact = pruner.compact()
    assert compact.conv1.out_channels == 4  # type: ignore[union-attr]
    masked, cut = (outputs_of(each.eval(), Example.of(CHAIN.example())) for each in (model, compact))
    assert len(masked) == 1
    assert torch.allclose(masked[0], cut[0], atol=1e-6)


def test_other_objects_as_outputs_are_refused_by_their_name() -> None:
    with pytest.raises(ModelError, match=r"must return tensors.* Got SimpleNamespace from Returning; wrap it"):
        sp.inspect(Returning(SimpleNamespace), CHAIN.example())
