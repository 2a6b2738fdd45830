"""The code blocks of the documents, and how tests run them.

All blocks of a page run in page order, in one new folder:

- ```bash runs in bash, which ends at the first command that fails. ```python runs in one namespace for the whole page.
- A title, as in ```python title="my_model.py", writes the block to that file instead.
- ```toml is a recipe if it has a title, and must be valid TOML in any case. ```text is output, and is not run.

A comment in the line above a block changes this:

    <!-- not run: REASON -->     the block is not run. Options of its commands must still be right
    <!-- tests add: OPTIONS -->  options that are added to each `nestpipe train`, to make it short
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>not run|tests add): (?P<text>.+?) -->\n)?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {"bash", "python", "toml", "text"}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    title: str | None = None
    reason: str | None = None
    """Why it is not run; None if it is."""
    added: str = ""
    """Options that tests add to each `nestpipe train`."""


def blocks_of(page: Path) -> list[Block]:
    blocks = []
    for match in FENCE.finditer(page.read_text()):
        text = {match["mark"]: match["text"]}
        reason, added = text.get("not run"), text.get("tests add", "")
        blocks.append(Block(match["language"], match["code"], match["title"], reason, added))
    return blocks


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def commands_of(code: str) -> list[list[str]]:
    """Returns the words of each command. A backslash joins lines; comments and & at the end are left out."""
    lines = code.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [[word for word in words if word != "&"] for words in commands if words]


def run_page(page: Path, folder: Path, namespace: dict[str, Any]) -> int:
    """Runs the blocks of a page in a folder. Returns the number of blocks that were run or written to a file."""
    num_run = 0
    for block in blocks_of(page):
        if block.reason is not None or block.language == "text":
            continue
        num_run += 1
        if block.title is not None:
            (folder / block.title).write_text(block.code)
        elif block.language == "bash":
            _run_bash(block, folder)
        elif block.language == "python":
            exec(compile(block.code, f"{page.name}, block {num_run}", "exec"), namespace)
        if block.language == "toml":
            tomllib.loads(block.code)
    return num_run


def _run_bash(block: Block, folder: Path) -> None:
    code = re.sub(r"^(.*\bnestpipe train\b[^#&\n]*)", rf"\1 {block.added} ", block.code, flags=re.MULTILINE)
    # Commands are those of this interpreter and of this source tree.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    python_path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    environment = {**os.environ, "PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
