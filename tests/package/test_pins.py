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


def test_ci_runs_every_python_and_the_oldest_torch() -> None:
    workflow = pytest.importorskip("yaml").safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    rows = workflow["jobs"]["matrix"]["strategy"]["matrix"]["include"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [text.rpartition(" ")[2] for text in project["classifiers"] if text.startswith("Programming Language")]
    assert [row["python"] for row in rows] == versions[1:]
    assert project["requires-python"] == f">={versions[1]}"
    oldest = Requirement(project["dependencies"][0]).specifier
    pairs = [row["torch"].split() for row in rows]
    assert pairs[0][0].removeprefix("torch==").removesuffix(".*") == str(oldest).split(">=")[1].partition(",")[0]
    for torch, torchvision in (pair for pair in pairs if "==" in pair[0]):
        assert int(torchvision.split(".")[1]) == int(torch.split(".")[1]) + 15
    assert ["torch", "torchvision"] in pairs  # the newest


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_forms_are_yaml(path: Path) -> None:
    content = pytest.importorskip("yaml").safe_load(path.read_text())
    assert {"jobs", "body", "updates", "contact_links"} & content.keys()
