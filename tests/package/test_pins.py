"""What make test installs is pinned, and the pins are allowed by the package."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def _pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(text) for text in [*project["dependencies"], *(text for extra in extras for text in extra)]]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_dependency_has_one_pin_that_it_allows(machine: str) -> None:
    environment = {"platform_machine": machine}
    pins: dict[str, list[str]] = {}
    for pin in _pins():
        if pin.marker is None or pin.marker.evaluate(environment):
            pins.setdefault(pin.name.lower(), []).append(str(pin.specifier).removeprefix("=="))
    for requirement in _declared():
        (version,) = pins[requirement.name.lower()]
        assert requirement.specifier.contains(version), requirement


def test_torch_and_torchvision_are_pinned_in_matching_pairs() -> None:
    pairs = {(p.name, str(p.marker)): str(p.specifier) for p in _pins() if p.name in ("torch", "torchvision")}
    markers = {marker for _, marker in pairs}
    assert len(markers) == 2
    for marker in markers:
        torch_minor = int(pairs["torch", marker].split(".")[1])
        torchvision_minor = int(pairs["torchvision", marker].split(".")[1])
        assert torchvision_minor == torch_minor + 15  # 2.10 goes with 0.25, 2.13 with 0.28
