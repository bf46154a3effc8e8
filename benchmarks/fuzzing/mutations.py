"""Mutations of bytes, TOML, JSON and pickles, by a random generator: a seed gives the same input again."""

import contextlib
import itertools
import json
import os
import pickletools
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

MARKUP = "<fuzz onclick=alert(1)>"
"""Must not reach a page as an element."""
ESCAPE = "\x1b[31mred\x1b]0;title\x07"
"""Must not reach a terminal."""

TEXTS = (
    "", " ", MARKUP, ESCAPE, "a|b", "a\nb", "\x00", "\u202eabc", "../../x", "/", "~", "x" * 5000, "nan", "1e999", "-1",
    "fuzz_canary:make", "é漢字😀", "{after}", "%s%n", "auto", "cuda:99", "0x10", "None", "[1, 2]", "a=b=c", "'", '"',
)  # fmt: skip
"""Values of a setting or a field that is text, or should not be."""

_NUMBERS = (
    "0", "-0", "-1", "1", "2", "0.5", "1.5", "-0.5", "1e-320", "1e308", "1e999", "-1e999", "100000", "1000000000",
    "2147483648", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" * 400, "7" * 5000,
)  # fmt: skip


def _nested(rng: Random, opening: str, closing: str) -> str:
    depth = rng.choice((3, 20, 100, 400, 700, 900, 1000, 5000, 100_000))
    return opening * depth + closing * depth


def json_value(rng: Random) -> str:
    """Return the JSON text of a hostile value."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return rng.choice(("NaN", "Infinity", "-Infinity", "null", "true", "false", "{}", "[]", "[[]]", "[null]"))
    if kind == 2:
        return rng.choice((r'"\ud800"', r'"\udfff\ud800"', r'"\u0000"', '"\\u001b[2J"', '{"a": 1, "a": 2}'))
    if kind == 3:
        return _nested(rng, *rng.choice((("[", "]"), ('{"a":', "}"))))
    if kind == 4:
        return f"[{', '.join(rng.choice(_NUMBERS[:18]) for _ in range(rng.randrange(1, 6)))}]"
    return json.dumps(rng.choice(TEXTS))


def toml_value(rng: Random) -> str:
    """Return the TOML text of a hostile value."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return rng.choice(
            ("nan", "inf", "-inf", "true", "false", "{}", "[]", "[[]]", "1979-05-27T07:32:00Z", "07:32:00")
        )
    if kind == 2:
        return rng.choice(
            (r'"\ud800"', r'"\u0000"', r'"\u001b[2J"', "'''\n'''", '"', "''", "{a = 1, a = 2}", "0xff", "0o7")
        )
    if kind == 3:
        return _nested(rng, *rng.choice((("[", "]"), ("{a = ", "}"))))
    if kind == 4:
        return f"[{', '.join(rng.choice(_NUMBERS[:18]) for _ in range(rng.randrange(1, 6)))}]"
    return json.dumps(rng.choice(TEXTS))  # TOML's basic strings have JSON's escapes


def mutate_bytes(rng: Random, content: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Flip bits, cut, insert, repeat, zero, overwrite, or mix with one of the ``others``; one to four times."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = rng.choice(_BYTES)(rng, content, others)
    return content


def _span(rng: Random, content: bytes) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 2, 8, 64, 1000)))


def _flip(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(content)
    # Headers are short and matter most.
    limit = rng.choice((len(content), min(len(content), 64), min(len(content), 1024)))
    for _ in range(rng.choice((1, 1, 2, 8)) if limit else 0):
        changed[rng.randrange(limit)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    return content[
        : rng.choice((0, 1, 8, len(content) // 2, max(len(content) - 1, 0), rng.randrange(len(content) + 1)))
    ]


def _insert(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 4, 64))) + content[at:]


def _delete(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(rng, content)
    return content[:start] + content[end:]


def _repeat(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(rng, content)
    return content[:end] + content[start:end] * rng.choice((1, 3)) + content[end:]


def _overwrite(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(rng, content)
    fill = rng.choice((b"\x00", b"\xff", b" ", b"[", b"9"))
    return content[:start] + fill * (end - start) + content[end:]


def _splice(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else content[::-1]
    return content[: rng.randrange(len(content) + 1)] + other[rng.randrange(len(other) + 1) :]


def _replace(rng: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    return rng.choice(others) if others else b""


_BYTES: tuple[Callable[[Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip, _flip, _flip, _truncate, _insert, _delete, _repeat, _overwrite, _splice, _replace,
)  # fmt: skip


def mutate_json(rng: Random, text: str) -> str:
    """Replace, delete, rename, repeat or wrap a value somewhere in a JSON document; one to three times."""
    document = json.loads(text)
    raw: dict[str, str] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = _mutate_node(rng, document, raw)
    text = json.dumps(document)
    for key, value in raw.items():
        text = text.replace(json.dumps(key), value)
    return text


def _mutate_node(rng: Random, node: Any, raw: dict[str, str]) -> Any:
    # Descend with a probability that reaches leaves and inner nodes alike.
    if isinstance(node, dict) and node and rng.random() < 0.85:
        key = rng.choice(list(node))
        action = rng.randrange(12)
        if action == 0:
            return {name: value for name, value in node.items() if name != key}
        if action == 1:
            return {(rng.choice(TEXTS) if name == key else name): value for name, value in node.items()}
        if action == 2:
            return {**node, rng.choice(("extra", *TEXTS)): _hostile(rng, raw)}
        if action == 3:
            return {**node, key: node[rng.choice(list(node))]}
        return {**node, key: _mutate_node(rng, node[key], raw)}
    if isinstance(node, list) and node and rng.random() < 0.85:
        at = rng.randrange(len(node))
        action = rng.randrange(8)
        if action == 0:
            return node[:at] + node[at + 1 :]
        if action == 1:
            return node[:at] + [node[at]] * rng.choice((2, 50)) + node[at + 1 :]
        return [*node[:at], _mutate_node(rng, node[at], raw), *node[at + 1 :]]
    if rng.random() < 0.1:
        return [node]
    return _hostile(rng, raw)


def _hostile(rng: Random, raw: dict[str, str]) -> str:
    """Return a text that stands for a raw JSON value, which ``json.dumps`` could not write."""
    key = f"fuzz-raw-{len(raw)}-{rng.getrandbits(32)}"
    raw[key] = json_value(rng)
    return key


def mutate_toml(rng: Random, text: str) -> str:
    """Replace, delete, repeat or add lines of a TOML document; one to three times."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(lines)) if lines else 0
        line = lines[at] if lines else ""
        key, equals, _ = line.partition("=")
        action = rng.randrange(10)
        if action == 0:
            lines[at : at + 1] = []
        elif action == 1:
            lines.insert(at, line)
        elif action == 2:
            name = rng.choice(("name", "seed", "extra", "train.epochs", '""', "grid"))
            lines.insert(at, f"{name} = {toml_value(rng)}")
        elif action == 3:
            lines[at : at + 1] = [
                rng.choice(("[train]", "[[run]]", "[method.options]", "[a.b.c]", "[[[", "=", "# \x00"))
            ]
        elif equals:
            lines[at : at + 1] = [f"{key}= {toml_value(rng)}"]
        else:
            lines[at : at + 1] = [
                line,
                f"{rng.choice(('name', 'epochs', 'dir', 'options', 'kind'))} = {toml_value(rng)}",
            ]
    return "\n".join(lines) + "\n"


def mutate_pickle(rng: Random, content: bytes) -> bytes:
    """Delete, repeat, exchange or overwrite whole opcodes of a pickle, so that it stays readable more often."""
    operations = list(pickletools.genops(content))
    starts = [position for _, _, position in operations if position is not None] + [len(content)]
    pieces = [content[start:end] for start, end in itertools.pairwise(starts)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, other = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        action = rng.randrange(6)
        if action == 0:
            del pieces[at]
        elif action == 1:
            pieces.insert(at, pieces[other])
        elif action == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif action == 3:
            pieces[at] = rng.choice(_OPCODES)
        elif action == 4:
            pieces.insert(at, rng.choice(_OPCODES))
        else:
            pieces[at] = _flip(rng, pieces[at][:64], ()) + pieces[at][64:]
        pieces = pieces or [b"."]
    return b"".join(pieces)


_OPCODES = (
    b"N", b"\x88", b"]", b"}", b")", b"b", b"R", b"\x81", b"0", b"2", b"(", b"t", b"\x85", b"K\xff", b"M\xff\xff",
    b"J\xff\xff\xff\x7f", b"\x8a\x10" + b"\xff" * 16, b"cbuiltins\neval\n", b"cos\nsystem\n", b"cnumpy\ndtype\n",
    b"cnumpy\nndarray\n", b"cbuiltins\nbytes\n", b"c_codecs\nencode\n", b"U\x01O", b"U\x02u1", b"U\x02O8", b"U\x03V99",
    b"X\x02\x00\x00\x00O8", b"B\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8, b"\x96" + b"\xff" * 7 + b"\x7f",
    b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"\x97", b"Q", b"P1\n",
)  # fmt: skip


def replace_by_other_kind(rng: Random, path: Path) -> str:
    """Put something that is no regular file, or an empty one, in the place of ``path``; return what."""
    kind = rng.choice(("missing", "empty", "folder", "fifo", "dangling link", "link to itself", "link to a device"))
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    return kind
