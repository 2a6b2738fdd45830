"""The repository keeps its own rules: import directions, small files, documents that agree with the code."""

import ast
import json
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
    "kernels": {"store"},
    "data": set(),
    "datasets": {"data", "store"},
    "distributed": {"device"},
    "ops": {"kernels"},
    "models": {"ops", "device"},
    "embedding": {"store", "kernels", "device", "data", "distributed"},
    "pipelining": {"embedding", "store", "device", "data", "distributed"},
    "train": {"pipelining", "embedding", "store", "device", "data", "distributed"},
    "evaluation": {"train", "embedding", "store", "data", "distributed"},
    "recipe": {
        *("evaluation", "train", "models", "pipelining", "embedding", "store", "device", "datasets", "data"),
        "distributed",
    },
    "cli": {"bench", "recipe", "train", "pipelining", "datasets", "data", "distributed", "store"},
    "bench": {
        *("recipe", "evaluation", "train", "models", "ops", "pipelining", "embedding", "datasets", "data"),
        *("device", "distributed", "store"),
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


@pytest.mark.parametrize("file", FILES)
def test_import_direction(file: str) -> None:
    part = part_of(file)
    assert part in ALLOWED, f"{file} is of a part that ALLOWED does not know"
    assert imported_parts(file) <= ALLOWED[part] | {part}


def test_the_page_says_what_may_be_imported() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([`\w, ]*)\| ", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert {part: set(re.findall(r"\w+", named)) for part, named in rows} == {p: a for p, a in ALLOWED.items() if p}


@pytest.mark.parametrize("file", FILES)
def test_no_relative_imports(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 0]


def test_files_are_small() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "csrc").rglob("*.?pp"), *(ROOT / "tests").rglob("*.py")]
    assert {path.name: lines for path in sources if (lines := len(path.read_text().splitlines())) > 400} == {}


@pytest.mark.parametrize("document", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=str)
def test_links_and_commands_of_documents_exist(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), f"{document.name} links to {link}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"`make ([a-z-]+)`", text):
        assert command in targets, f"{document.name} names make {command}"


def test_every_line_of_exactness_has_its_test() -> None:
    """For each schedule that the package has; and each such file says what makes it fail."""
    from nestpipe.pipelining.schedule import SCHEDULES

    rows = re.findall(
        r"^\| ([EI]\d+) \|.*?\| ([a-z, ]+) \| `?([\w/. ]*)`? \|$", (ROOT / "docs/exactness.md").read_text(), re.M
    )
    assert [line for line, *_ in rows] == [*(f"E{i}" for i in range(1, 5)), *(f"I{i}" for i in range(1, 16))]
    for line, schedules, file in rows:
        if set(schedules.split(", ")) & set(SCHEDULES):
            assert (ROOT / file).exists(), f"{line} needs {file} for {schedules}"
            docstring = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
            assert "ails" in docstring, f"{file} does not say which change makes it fail"


def test_versions_agree() -> None:
    import nestpipe

    assert f"## {nestpipe.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def results(name: str) -> list[dict[str, float]]:
    records = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["records"]
    assert isinstance(records, list)
    return records


def test_readme_figures_are_those_of_the_results() -> None:
    """Line by line: what is measured, on both machines, with 1 and with 2 threads."""
    readme = (ROOT / "README.md").read_text()
    machines = [results("store.json"), results("store-h200-host.json")]

    def figures(field: str, **where: object) -> str:
        chosen = [
            [r[field] for r in records if field in r and all(r.get(k) == v for k, v in where.items())]
            for records in machines
        ]
        assert [len(of_machine) for of_machine in chosen] == [2, 2]
        return " | ".join(f"{value:.2f}" for of_machine in chosen for value in of_machine)

    for dim, ranks, what in ((64, 1, "dim 64"), (128, 1, "dim 128"), (64, 8, "dim 64, keys of one rank of 8")):
        where = {"dim": dim, "ranks": ranks}
        assert f"| gather, {what} | {figures('gather_vs_index_select', **where)} |" in readme
        assert f"| scatter, {what} | {figures('scatter_vs_index_copy', **where)} |" in readme
    for method, what in (("zipf_1.05", "Zipf 1.05"), ("random", "random")):
        assert f"| unique, 1M {what} keys | {figures('unique_vs_torch', method=method)} |" in readme
    for field, text in (
        ("growth_slowdown", "{:.2f} and {:.2f} times"),
        ("overhead_bytes_per_row", "{:.1f} and {:.1f} resident"),
    ):
        values = [next(r[field] for r in records if field in r) for records in machines]
        assert text.format(*values) in readme


def test_readme_figures_of_whole_steps() -> None:
    readme = (ROOT / "README.md").read_text()
    schedules = results("schedules.json")
    hidden = {r["schedule"]: r for r in schedules if "lookup_hidden_fraction" in r}
    inter, nested = hidden["inter"], hidden["nested"]
    (serial,) = [r for r in schedules if "lookup_share" in r]
    (overhead,) = [r for r in schedules if "overhead_vs_serial" in r]
    traffic = [r["host_traffic_vs_serial"] for r in schedules if "host_traffic_vs_serial" in r]
    adagrad, adam = results("plain.json")
    for text in (
        f"{serial['lookup_share']:.2f} of a serial step is waiting for the store;",
        f"inter hides {inter['lookup_hidden_fraction']:.2f} of that wait,",
        f"and {inter['lookup_hidden_end_to_end']:.2f} of it end to end.",
        f"A step is {inter['speedup_vs_serial']:.2f} times as fast",
        f"takes {inter['dense_slowdown']:.2f} times as long",
        f"Nested hides {nested['lookup_hidden_fraction']:.2f}, and a step is {nested['speedup_vs_serial']:.2f} times",
        f"there remain {traffic[0]:.2f}, {traffic[1]:.2f} and {traffic[2]:.2f} when",
        f"nested takes {overhead['overhead_vs_serial']:.3f} of serial's time",
        f"is {adagrad['embedding_speed_vs_plain']:.2f} and {adam['embedding_speed_vs_plain']:.2f} times",
        f"step {adagrad['speed_vs_plain']:.2f} and {adam['speed_vs_plain']:.2f} times faster",
    ):
        assert text in readme.replace("\n", " "), text


def test_readme_figures_of_exchanges() -> None:
    readme = (ROOT / "README.md").read_text()
    network = [r for r in results("network.json") if r.get("window") == "once"]
    paced = {r["schedule"]: r for r in network if "exposed_exchange_fraction" in r}
    intra, nested = paced["intra"], paced["nested"]
    (real,) = [r for r in network if r["schedule"] == "nested" and r["compute"] == "real"]
    exposed = [r["exposed_over_two_exchanges"] for r in results("overlap.json") if r["schedule"] == "nested"]
    clusters = {(r["data"], r["method"]): r for r in results("cluster.json") if r["num_micro_batches"] == 8}
    spectral, given = ([clusters[data, method] for data in ("seq", "ctr")] for method in ("spectral", "none"))
    for text in (
        f"intra leaves {intra['exposed_exchange_fraction']:.3f} and nested {nested['exposed_exchange_fraction']:.3f}",
        f"({(nested['head_share'] + nested['tail_share']) / 2:.3f} is the least:",
        " and ".join(f"{r['exposed_exchange_end_to_end']:.3f}" for r in (intra, nested)) + " end to end",
        f"nested is {nested['speedup_vs_serial']:.2f} times as fast, {nested['speedup_vs_allowed']:.2f} of what",
        f"nested is {real['real_speedup_vs_serial']:.2f} times as fast.",
        f"exposes {exposed[0]:.2f}, {exposed[1]:.2f} and {exposed[2]:.2f} times two of them",
        f"uses {spectral[0]['head_share']:.3f} (2,048 sequences) and {spectral[1]['head_share']:.3f} (16,384 clicks)",
        f"{given[0]['head_share']:.3f} and {given[1]['head_share']:.3f} in the given order",
        f"takes {spectral[0]['cluster_ms']:.1f} and {spectral[1]['cluster_ms']:.1f} ms of one thread",
    ):
        assert text in readme.replace("\n", " "), text
