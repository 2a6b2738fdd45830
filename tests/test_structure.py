"""The shape of the code: few files that ask for a device, short functions, and one name for each thing.

Each test fails if a file, a function or a name is added that it counts: for example `if device.type == "cuda"` in
nestpipe/train and in nestpipe/pipelining, or a method `bring` of DistributedBatch.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nestpipe.pipelining.stage import STAGES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nestpipe"
ASKS_FOR_DEVICE = re.compile(r'is_accelerator|has_streams|\.is_cuda|device\.type|"cuda"')
MAY_ASK = {f"embedding/{name}.py" for name in ("memory", "host_memory", "device_memory")}
"""the interface to memory of both kinds; device/, kernels/ and bench/ may, too"""
MOST_FILES_THAT_ASK = 4
MOST_LINES = 60
OLD_NAMES = {
    "bring",
    "take",
    "leaf",
    "leaves",
    "placed",
    "Flight",
    "lend",
    "has_streams",
    "judge",
    "is_unsound",
    "is_torn",
    "_hear",
}


def core_files() -> list[Path]:
    return sorted(path for part in ("embedding", "pipelining") for path in (PACKAGE / part).rglob("*.py"))


def test_few_files_ask_for_a_device() -> None:
    asking = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] not in ("device", "kernels", "bench") and name not in MAY_ASK:
            asking += [name] if ASKS_FOR_DEVICE.search(path.read_text()) else []
    assert len(asking) <= MOST_FILES_THAT_ASK, asking


def test_functions_are_short() -> None:
    long = {}
    for path in core_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MOST_LINES:
                    long[f"{path.name}: {node.name}"] = num_lines
    assert long == {}


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Classes, functions, their parameters, names of the module and of classes, attributes that are set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.arg):
            yield node.arg
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                targets = [*targets, *([statement.target] if isinstance(statement, ast.AnnAssign) else [])]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_no_old_names() -> None:
    """What was renamed stays renamed, so that a reader meets one name for each thing."""
    found = {}
    for path in core_files():
        names = {path.stem, *defined_names(ast.parse(path.read_text()))}
        if names & OLD_NAMES:
            found[path.relative_to(ROOT).as_posix()] = sorted(names & OLD_NAMES)
    assert found == {}
    assert not STAGES.keys() & OLD_NAMES
