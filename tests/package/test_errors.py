"""One except clause catches everything that softprune refuses."""

import ast
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import softprune as sp
from softprune import errors
from softprune.lab.data import load_data


def test_every_error_is_a_softprune_error_and_a_value_error() -> None:
    classes = [
        value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert len(classes) == 9
    for cls in classes:
        assert issubclass(cls, errors.SoftpruneError)
        assert issubclass(cls, ValueError)
        assert cls.__doc__


def test_every_warning_begins_with_softprune() -> None:
    without = []
    for file in sorted(Path(errors.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                text = ast.unparse(node.args[0]).strip("f'\"") if node.args else ""
                if node.func.attr in ("warning", "warn") and not text.startswith("softprune: "):
                    without.append(f"{file.name}:{node.lineno}: {text}")
    assert not without, "\n".join(without)


def test_control_characters_are_shown_not_sent_to_the_terminal() -> None:
    assert errors.printable("a\x1b[31m\n\u202e") == "a\\x1b[31m\\n\\u202e"
    assert errors.printable("\N{GREEK SMALL LETTER DELTA} plain name") == "\N{GREEK SMALL LETTER DELTA} plain name"
    assert errors.printable("a\nb\r", "\n\t") == "a\nb\\r"


NET, ROW = nn.Linear(2, 2), torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sp.models.build("digits_net", "3"), "`num_classes` must be an integer. Got '3'."),
        (lambda: sp.models.build("digits_net", True), "`num_classes` must be an integer. Got True."),
        (lambda: sp.models.build("digits_net", num_classes=3.5), "`num_classes` must be an integer. Got 3.5."),
        (lambda: load_data(None), "`name` must be a string. Got None."),
        (lambda: load_data("digits", 3), "`root` must be a string or a path or None. Got 3."),
        (lambda: sp.inspect(NET, ROW, site_kinds=None), "`site_kinds` must be a list. Got None."),
        (lambda: sp.verify(NET, NET, ROW, tolerance="1"), "`tolerance` must be a number. Got '1'."),
        (lambda: sp.verify(NET, NET, ROW, seed=1.5), "`seed` must be an integer. Got 1.5."),
        (lambda: sp.save(NET, "x", origin="x"), "`origin` must be a softprune.cut.Origin or None. Got 'x'; leave it"),
        (lambda: sp.export.to_onnx(NET, ROW, None), "`path` must be a string or a path. Got None."),
        (lambda: sp.export.to_onnx(NET, ROW, "x", fold_bn="no"), "`fold_bn` must be True or False. Got 'no'."),
        (
            lambda: sp.export.to_onnx(nn.Linear, ROW, "x.onnx"),
            "`model` must be a torch.nn.Module. Got the class Linear, ",
        ),
        (lambda: sp.bench.compare_latency(NET, None, ROW), "`compact` must be a torch.nn.Module. Got NoneType; "),
        (lambda: sp.bench.compare_latency(NET, NET, ROW, backends=3), "`backends` must be a list. Got 3."),
        (lambda: sp.distillation_loss(ROW, (ROW,), ROW), "`teacher_logits` must be a tensor. Got tuple; "),
        (lambda: sp.distillation_loss(ROW, ROW, ROW, weight="1"), "must be from 0 to 1. Got '1'."),
    ],
)
def test_an_argument_of_another_type_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(errors.SoftpruneError) as caught:
        call()
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert isinstance(sp.models.build("digits_net", np.int64(3)), nn.Module)
    logits, share, two = torch.zeros(2, 3), np.float32(0.5), np.float32(2)
    assert sp.distillation_loss(logits, logits, torch.tensor([0, 1]), weight=share, temperature=two).isfinite()


def test_numbers_of_numpy_arrive_as_those_of_python() -> None:
    @errors.check_types
    def given(yes: bool, count: int, share: float | None, names: Iterable[str]) -> tuple[object, ...]:
        return yes, count, share, names

    names = np.array(["a", "b"])
    values = given(np.True_, np.int32(3), share=np.float32(0.5), names=names)
    assert values[:3] == (True, 3, 0.5)
    assert [type(value) for value in values[:3]] == [bool, int, float]
    assert values[3] is names
    with pytest.raises(errors.ConfigError, match=r"^`count` must be an integer\. Got a bool"):
        given(True, np.True_, 0.5, [])
    with pytest.raises(errors.ConfigError, match=r"^`yes` must be True or False\. Got np.int64\(1\)"):
        given(np.int64(1), 1, 0.5, [])


def test_the_error_for_other_arguments_names_the_function() -> None:
    with pytest.raises(TypeError, match=r"build\(\) missing 1 required positional argument: 'num_classes'"):
        sp.models.build("digits_net")  # type: ignore[call-arg]
