"""The formats: how an input of each is made from a seed file, which code handles it, and what may come of it.

Every function returns "same" (the result of the undamaged file) or "accepted" (another valid result), raises a
SoftpruneError (refused), or raises :class:`WrongResult`. Anything else is a finding.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.mutations import json_value, mutate_bytes, mutate_json, replace_by_other_kind
from fuzzing.seeds import Seeds
from fuzzing.worker import NO_MEMORY, WrongResult

Handler = Callable[[Random, Seeds, Path], str]

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_EXIT_CODES = (0, 2, 75)
"""Done, an error that the user can correct, stopped and saved."""


@dataclass(frozen=True)
class Format:
    """A kind of input."""

    name: str
    share: float
    """Of all inputs."""
    handle: Handler


FORMATS: dict[str, Format] = {}


def register(share: float) -> Callable[[Handler], Handler]:
    """Add a format under the function's name."""

    def add(function: Handler) -> Handler:
        FORMATS[function.__name__] = Format(function.__name__, share, function)
        return function

    return add


def command(*arguments: str, terminal: bool = True) -> tuple[int, str]:
    """Run a command line in this process; return its exit code and output, which must be fit for a terminal."""
    from typer.testing import CliRunner

    from softprune.lab.cli.app import app

    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    if result.exit_code not in _EXIT_CODES:
        raise WrongResult(f"exit code {result.exit_code}: {result.output[-500:]}")
    if result.exit_code == 2 and "rror" not in result.output:
        raise WrongResult(f"exit code 2 without a message: {result.output[-500:]!r}")
    if NO_MEMORY.search(result.output):
        raise WrongResult(f"an allocation failed: {result.output[-500:]}")
    if terminal and (found := CONTROL.search(result.output)):
        raise WrongResult(f"{found[0]!r} reaches the terminal: {result.output[:500]!r}")
    if Path("IMPORTED").exists():
        raise WrongResult("a file named a module, and it was imported")
    return result.exit_code, result.output


def outcome_of(code: int) -> str:
    return "refused" if code == 2 else "accepted"


def check_same_run(run: Path, seeds: Seeds) -> None:
    """Raise WrongResult unless a resumed run ended as the seed run did, bit for bit."""
    good = seeds.folder / "run"
    if (run / "compact.safetensors").read_bytes() != (good / "compact.safetensors").read_bytes():
        raise WrongResult("a resumed run ended with another network")
    if _without_times(run / "metrics.jsonl") != _without_times(good / "metrics.jsonl"):
        raise WrongResult("a resumed run ended with other metrics")


def _without_times(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "images_per_second")} for row in rows]


def mutate_text(rng: Random, path: Path, seeds: Seeds, by_structure: Callable[[Random, str], str]) -> None:
    """Damage a text file: by its structure, by its bytes, or as a whole."""
    kind = rng.random()
    if kind < 0.65:
        text = by_structure(rng, path.read_text(encoding="utf-8"))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif kind < 0.95:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), seeds.others))
    else:
        replace_by_other_kind(rng, path)


def mutate_lines(rng: Random, text: str) -> str:
    """Damage one line of a JSON lines file."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    lines[at : at + 1] = rng.choice(([mutate_json(rng, lines[at])], [json_value(rng)], [lines[at]] * 2, [], ["{}"]))
    return "\n".join(lines) + "\n"
