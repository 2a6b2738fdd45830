"""Every command block and every Python block of the documents runs; those that cannot have commands that exist.

Fails, for example, if a page gives `nestpipe train` an option that it does not have, or if an assert of a page fails.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from nestpipe.cli.main import app
from nestpipe.recipe.text import load_config
from tests.docs.blocks import DOCS, LANGUAGES, ROOT, Block, blocks_of, commands_of, pages, run_page
from tests.docs.surroundings import SURROUNDINGS

QUICK = ("architecture.md", "evaluation.md", "index.md", "recipes.md", "torchrec.md")
"""Pages that run in `make test`: Python alone, in this process. Commands take seconds to start, so others are slow."""
WITH_CODE = [page for page in pages() if any(block.language != "text" for block in blocks_of(page))]


def ids(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    surroundings = SURROUNDINGS.get(ids(page))
    namespace = {"__name__": "page"} | (surroundings(folder) if surroundings is not None else {})
    num_run = run_page(page, folder, namespace)
    num_marked = sum(block.reason is not None for block in blocks_of(page))
    assert num_run + num_marked == sum(block.language != "text" for block in blocks_of(page))


@pytest.mark.parametrize("page", [DOCS / name for name in QUICK], ids=ids)
def test_quick_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(page, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(300)  # the tutorial starts ten commands, next to other tests
@pytest.mark.parametrize("page", [page for page in WITH_CODE if page.name not in QUICK], ids=ids)
def test_slow_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(page, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", pages(), ids=ids)
def test_every_block_has_a_known_language(page: Path) -> None:
    fences = re.findall(r"^ *```.*$", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks_of(page)), "a fence that is indented, not closed, or has no known form"
    assert {block.language for block in blocks_of(page)} <= LANGUAGES


@pytest.mark.parametrize("page", WITH_CODE, ids=ids)
def test_commands_have_these_options(page: Path) -> None:
    """Holds for blocks that are not run, too."""
    for block in blocks_of(page):
        if block.language == "bash":
            for words in commands_of(block.code):
                check_command(words)
        if block.language == "python":
            compile(block.code, page.name, "exec")


def test_commands_of_the_readme_have_these_options() -> None:
    """Behind a command of the README, two or more spaces separate what it does."""
    text = (ROOT / "README.md").read_text()
    lines = [line for fence in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S) for line in fence.splitlines()]
    commands = [re.split(r" {2,}", line)[0] for line in lines if re.match(r"(nestpipe|torchrun|make) ", line)]
    assert len(commands) > 10
    for command in commands:
        check_command(commands_of(command)[0])


def check_command(words: list[str]) -> None:
    """Parses the options of a command of ours, torchrun's, or a target of make. Other commands are the system's."""
    if words[:3] == ["python", "-m", "nestpipe"]:
        words = words[2:]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "torchrun":
        arguments = get_args_parser().parse_args(words[1:])
        if arguments.module and arguments.training_script == "nestpipe":
            check_command(["nestpipe", *arguments.training_script_args])
    elif words[0] == "nestpipe":
        check_nestpipe(words[1:])


@cache
def nestpipe_command() -> Any:
    return typer.main.get_command(app)


def check_nestpipe(words: list[str]) -> None:
    command = nestpipe_command()
    context = command.make_context("nestpipe", [], resilient_parsing=True)
    while hasattr(command, "get_command"):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        command = found
    with command.make_context(command.name or "", words, parent=context) as parsed:
        load_config(None, parsed.params.get("settings") or ())


def test_a_wrong_option_is_found(tmp_path: Path) -> None:
    for line in ("nestpipe train --no-such-option", "nestpipe train --set train.stepz=3", "nestpipe tarin"):
        with pytest.raises((Exception, SystemExit)):
            check_command(commands_of(line)[0])
    with pytest.raises(AssertionError):
        check_command(["make", "no-such-target"])


def test_marks_are_read(tmp_path: Path) -> None:
    """A block that fails fails the page, and one that is marked does not run."""
    page = tmp_path / "page.md"
    page.write_text('<!-- not run: fails -->\n```bash\nfalse\n```\n\n```python title="a.py"\n1 / 0\n```\n')
    assert blocks_of(page)[0] == Block("bash", "false\n", reason="fails")
    assert run_page(page, tmp_path, {}) == 1
    assert (tmp_path / "a.py").read_text() == "1 / 0\n"
    page.write_text("```bash\nfalse\ntrue\n```\n")
    with pytest.raises(AssertionError, match="false"):
        run_page(page, tmp_path, {})
