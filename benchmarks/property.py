"""Random networks: is every cut exact, and every target met or refused?

    python benchmarks/property.py                  # 1,000 networks; resumes; writes benchmarks/records/property.json
    python benchmarks/property.py --networks 20    # a few of them
    python benchmarks/property.py --only 17        # one again, with its traceback

Each network is composed of random blocks: groups, sums, residual streams, linear sites, functional use of weights,
shared weights. One in twenty has a forward() that a deep copy shares, which must be refused. Of the others random
channels are cut three times, and masked and compact network are compared in float64 and float32; then a target of
random size is asked for, in random multiples and kinds of sites, and a few training steps follow, with a random
optimizer at a learning rate from 0 to divergence. No limit may be exceeded, and no output become constant unsaid.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from revision import revision
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests" / "support")]

from random_networks import ACTIVATIONS, KINDS, Block, RandomNet, Spec, assert_sound  # noqa: E402
from topologies import randomise_  # noqa: E402

import softprune  # noqa: E402
from softprune.errors import ConfigError, ModelError, VerificationError  # noqa: E402
from softprune.graph.channels import KINDS as SITE_KINDS  # noqa: E402

RECORD = HERE / "records" / "property.json"
STEPS = 3
"""Training steps with a target."""
OPTIMIZERS = ("SGD", "AdamW", "RMSprop")
RATES = (0.0, 1e-3, 0.05, 1.0, 1e3, 1e30)
STATES = ("inexact", "over budget", "constant, unsaid", "crash")
"""Failures."""


def random_spec(number: int) -> tuple[Spec, random.Random]:
    """Return the network `number`, and the generator that decides what else happens to it."""
    rng = random.Random(number)

    def block() -> Block:
        return Block(
            rng.choice(KINDS), 2 * rng.randint(1, 4), rng.choice([1, 3]), rng.random() < 0.5, rng.choice([*ACTIVATIONS])
        )

    blocks = tuple(block() for _ in range(rng.randint(1, 6)))
    head = rng.choice(["pool", "flatten", "norm", "two"])
    return Spec(2 * rng.randint(1, 4), rng.random() < 0.5, blocks, head, number), rng


def examine(number: int) -> dict[str, Any]:
    """Return what became of the network `number`."""
    spec, rng = random_spec(number)
    row: dict[str, Any] = {"number": number, "blocks": [block.kind for block in spec.blocks]}
    if number % 20 == 19:
        return row | {"blocks": [*row["blocks"], "shared copy"], "cut": _shared_copy(spec)}
    kinds = {kind for kind in SITE_KINDS if rng.random() < 0.7}
    try:
        assert_sound(spec, number, kinds, deaths=(0.0, 0.3, 0.7))
        row["cut"] = "exact"
    except AssertionError:
        row |= {"cut": "inexact", "reason": traceback.format_exc(limit=-2)}
    return row | _budget(spec, rng, kinds)


def _shared_copy(spec: Spec) -> str:
    """A deep copy of this network computes with the original's layers."""
    model = RandomNet(spec)
    original = model.forward
    model.forward = lambda x: original(x.float())  # type: ignore[method-assign]
    try:
        softprune.SoftPruner(model, torch.randn(2, 3, 8, 8))
    except ModelError:
        return "refused"
    return "inexact"


def _budget(spec: Spec, rng: random.Random, kinds: set[str]) -> dict[str, Any]:
    model = randomise_(RandomNet(spec), spec.seed)
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(spec.seed))
    asked: dict[str, Any] = {
        "target": {rng.choice(("macs", "flops", "params", "channels")): round(rng.uniform(0.3, 0.95), 2)},
        "round_to": rng.choice((1, 1, 2, 3, 8)),
        "site_kinds": sorted(kinds),
    }
    optimizer, rate = rng.choice(OPTIMIZERS), rng.choice(RATES)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setLevel(logging.WARNING)
    logging.getLogger("softprune").addHandler(handler)
    try:
        outcome = _train(model, x, asked, optimizer, rate, said)
    finally:
        logging.getLogger("softprune").removeHandler(handler)
    return {"asked": asked | {optimizer: rate}, "target": outcome}


def _train(
    model: RandomNet, x: Tensor, asked: dict[str, Any], optimizer_name: str, rate: float, said: io.StringIO
) -> str:
    """Return what became of a target."""
    try:
        pruner = softprune.SoftPruner(model, x, total_steps=STEPS, **asked)
    except (ConfigError, ModelError):
        return "refused"
    optimizer = getattr(torch.optim, optimizer_name)(pruner.parameter_groups(1e-4), lr=rate)
    pruner.attach(optimizer)
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            pruner.loss(_first(model(x)).square().mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # random networks may have large outputs
            optimizer.step()
        pruner.decide()
        compact = pruner.compact()
    except (ModelError, VerificationError, ConfigError) as error:
        return f"refused while training: {type(error).__name__}"
    status = pruner.status
    assert status is not None
    counted = softprune.cost(compact, x[:1])
    found = {"macs": counted.macs, "flops": 2 * counted.macs, "params": counted.params}
    if found.get(status.target, status.cost) > status.limit:
        return "over budget"
    inputs = torch.cat([x, torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))])
    lost = _variation(pruner.detach(), inputs) > 1e-3 and _variation(compact, inputs) < 1e-9
    if lost and "for every input" not in said.getvalue():
        return "constant, unsaid"
    return "met"


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _variation(network: torch.nn.Module, x: Tensor) -> float:
    """Return how far outputs of different inputs are apart, as a share of the largest output."""
    with torch.no_grad():
        output = _first(network.double().eval()(x.double()))
    return float((output - output[:1]).abs().max() / output.abs().max().clamp(min=1e-300))


def guarded(number: int) -> dict[str, Any]:
    """As `examine`; any other exception is a crash."""
    try:
        return examine(number)
    except Exception as error:
        return {"number": number, "cut": "crash", "reason": f"{type(error).__name__}: {error}"[:1000]}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts."""
    return {
        "networks": len(rows),
        "cuts": dict(Counter(row["cut"] for row in rows)),
        "targets": dict(Counter(row["target"] for row in rows if "target" in row)),
        "networks_with": dict(Counter(kind for row in rows for kind in {*row.get("blocks", ())})),
        "failed": [row for row in rows if row["cut"] in STATES or row.get("target") in STATES],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 where a network failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.only is not None:
        print(json.dumps(examine(options.only), indent=1))
        return 0
    # One line a network, beside the record, so that a stopped run resumes; another revision starts again.
    code = revision("src", "benchmarks/property.py", "tests/support")
    lines = options.out.with_suffix(".jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    rows = [row for row in rows if row["revision"] == code]
    began = time.monotonic()
    with lines.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        done = {row["number"] for row in rows}
        for number in range(options.networks):
            if number in done:
                continue
            rows.append(guarded(number) | {"revision": code})
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            if rows[-1]["cut"] in STATES or rows[-1].get("target") in STATES:
                print(json.dumps(rows[-1]), flush=True)
    found = summary(rows)
    record = {"command": "make property", "revision": code, "torch": torch.__version__, **found}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    lines.unlink()
    print({key: found[key] for key in ("networks", "cuts", "targets")}, f"{time.monotonic() - began:.0f} s")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
