"""The repository keeps its own rules: import directions, small files, documents that agree with the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nestpipe"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))

# A part may import itself and the parts named here. The path of the data runs the other way.
ALLOWED = {
    "store": set(),
    "device": set(),
    "kernels": {"store", "device"},
    "data": set(),
    "datasets": {"data", "store"},
    "distributed": {"store", "device"},
    "ops": {"kernels"},
    "models": {"ops", "device"},
    "embedding": {"store", "kernels", "device", "data", "distributed"},
    "checkpoint": {"embedding", "store", "distributed"},
    "pipelining": {"checkpoint", "embedding", "store", "device", "data", "distributed"},
    "train": {"checkpoint", "pipelining", "embedding", "kernels", "store", "device", "data", "distributed"},
    "evaluation": {"checkpoint", "train", "embedding", "store", "data", "distributed"},
    "prediction": {"train", "pipelining", "embedding", "data", "device", "distributed"},
    "recipe": {
        *(
            "prediction",
            "evaluation",
            "train",
            "checkpoint",
            "models",
            "pipelining",
            "embedding",
            "store",
            "device",
            "datasets",
        ),
        *("data", "diagnosis", "distributed"),
    },
    "diagnosis": {"pipelining", "distributed"},
    "report": set(),
    "simulator": {"recipe", "report", "prediction", "pipelining", "embedding"},
    "sizing": {
        *("simulator", "prediction", "recipe", "train", "pipelining", "embedding", "data", "device", "distributed"),
        "store",
    },
    "cli": {
        *(
            "bench",
            "sizing",
            "simulator",
            "prediction",
            "recipe",
            "report",
            "train",
            "checkpoint",
            "pipelining",
            "datasets",
            "data",
        ),
        *("diagnosis", "distributed", "store"),
    },
    "bench": {
        *(
            "simulator",
            "prediction",
            "recipe",
            "evaluation",
            "train",
            "checkpoint",
            "models",
            "ops",
            "pipelining",
            "embedding",
            "datasets",
        ),
        *("data", "device", "diagnosis", "distributed", "store"),
    },
    "": {"data", "distributed", "embedding", "evaluation", "pipelining", "store", "train", "cli"},
}


def part_of(file: str) -> str:
    return file.split("/")[1] if file.count("/") > 1 else ""


def imported_parts(file: str) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name.startswith("nestpipe.") and (PACKAGE / name.split(".")[1]).is_dir():
                parts.add(name.split(".")[1])
    return parts


def test_import_direction() -> None:
    unknown = [file for file in FILES if part_of(file) not in ALLOWED]
    assert unknown == [], "are of parts that ALLOWED does not know"
    wrong = {file: imported_parts(file) - ALLOWED[part_of(file)] - {part_of(file)} for file in FILES}
    assert {file: parts for file, parts in wrong.items() if parts} == {}


def test_the_page_says_what_may_be_imported() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([`\w, ]*)\| ", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert {part: set(re.findall(r"\w+", named)) for part, named in rows} == {p: a for p, a in ALLOWED.items() if p}


def test_no_relative_imports() -> None:
    found = []
    for file in FILES:
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        found += [file for node in nodes if isinstance(node, ast.ImportFrom) and node.level > 0]
    assert found == []


def test_files_are_small() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "csrc").rglob("*.?pp"), *(ROOT / "tests").rglob("*.py")]
    assert {path.name: lines for path in sources if (lines := len(path.read_text().splitlines())) > 400} == {}


@pytest.mark.parametrize("document", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=str)
def test_links_and_commands_of_documents_exist(document: Path) -> None:
    text = document.read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
        assert (document.parent / link).exists(), f"{document.name} links to {link}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"`make ([a-z-]+)`", text):
        assert command in targets, f"{document.name} names make {command}"


def test_every_line_of_exactness_has_its_test() -> None:
    """For each schedule that the package has; and each such file says what makes it fail."""
    from nestpipe.pipelining.schedule import SCHEDULES

    rows = re.findall(
        r"^\| ([EIRX]\d+) \|.*?\| ([a-z, ]+) \| `?([\w/. ]*)`? \|$", (ROOT / "docs/exactness.md").read_text(), re.M
    )
    numbers = {"E": 8, "I": 15, "R": 10, "X": 5}
    assert [line for line, *_ in rows] == [f"{kind}{i + 1}" for kind, most in numbers.items() for i in range(most)]
    for line, schedules, file in rows:
        if set(schedules.split(", ")) & set(SCHEDULES):
            assert (ROOT / file).exists(), f"{line} needs {file} for {schedules}"
            docstring = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
            assert "ails" in docstring, f"{file} does not say which change makes it fail"


def test_versions_agree() -> None:
    import nestpipe

    assert f"## {nestpipe.__version__}" in (ROOT / "CHANGELOG.md").read_text()
