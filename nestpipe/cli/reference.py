"""Writes the reference of recipe keys, cluster keys and commands as Markdown, from the code that reads them.

python -m nestpipe.cli.reference docs/reference
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from nestpipe.cli.main import app
from nestpipe.recipe.config import Config
from nestpipe.recipe.text import describe
from nestpipe.simulator import cluster_text
from nestpipe.simulator.cluster import Cluster

MARK = "<!-- `make reference` writes this file. Do not edit it. -->"
HIDDEN = {"--help", "--install-completion", "--show-completion"}
"""Options that typer adds to every command."""


def keys_page() -> str:
    """Returns a page with a table of keys for each section of a recipe."""
    parts = [
        f"# Recipe keys\n\n{MARK}\n",
        "Every key of a [recipe](../recipes.md), by section. Each has a default, and the defaults are the demo. "
        "`nestpipe train --list-keys` prints the same list. `--set SECTION.KEY=VALUE` changes one key on the command "
        "line.\n",
    ]
    return "\n".join([*parts, *_key_tables(describe(), get_type_hints(Config))])


def cluster_page() -> str:
    """Returns a page with a table of keys for each section of a cluster file."""
    parts = [
        f"# Cluster keys\n\n{MARK}\n",
        "Every key of a file of `nestpipe simulate` ([What would it take on a cluster?](../simulator.md)), by section. "
        "The defaults are the default cluster. `nestpipe simulate --list-keys` prints the same list.\n",
    ]
    return "\n".join([*parts, *_key_tables(cluster_text.describe(), get_type_hints(Cluster))])


def _key_tables(described: Sequence[tuple[str, str, str, str]], sections: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a table for each section."""
    for section, rows in groupby(described, key=lambda row: row[0].split(".")[0]):
        header = f"[[{section}]]" if section == "tables" else f"[{section}]"
        yield f"## `{header}`\n\n{_section_text(sections[section])}| key | meaning | default | type |"
        yield "| --- | --- | --- | --- |"
        yield from (_row(f"`{key}`", *map(_cell, (meaning, default, kind))) for key, kind, default, meaning in rows)
        yield ""


def _section_text(hint: Any) -> str:
    """Returns the docstring of a section; empty if it is the one that dataclass makes."""
    section: Any = hint if is_dataclass(hint) else get_args(hint)[0]
    text = inspect.getdoc(section) or ""
    return "" if text.startswith(f"{section.__name__}(") else f"{text}\n\n"


def commands_page() -> str:
    """Returns a page with every command, its arguments and its options."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = group.make_context("nestpipe", [], resilient_parsing=True)
    parts = [
        f"# Command line\n\n{MARK}\n",
        f"{group.help} `nestpipe COMMAND --help` prints the same text.\n",
        *_commands(group, context, "nestpipe"),
    ]
    return "\n".join(parts)


def _commands(group: TyperGroup, context: Any, path: str) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = command.make_context(name, [], parent=context, resilient_parsing=True)
        level = "#" * (path.count(" ") + 2)
        yield f"{level} `{path} {name}`\n"
        yield _help(command.help or "")
        if isinstance(command, TyperGroup):
            yield from _commands(command, inner, f"{path} {name}")
            continue
        records = [param.get_help_record(inner) for param in command.get_params(inner)]
        shown = [record for record in records if record is not None and record[0].split(" ")[0] not in HIDDEN]
        if shown:
            yield "| argument or option | meaning |\n| --- | --- |"
            yield "\n".join(_row(f"`{_option(name)}`", _cell(text)) for name, text in shown) + "\n"


def _help(text: str) -> str:
    """Returns help text as Markdown. A paragraph after \\b keeps its lines, as in the terminal."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        kept = paragraph.removeprefix("\b\n").removeprefix("\\b\n")
        if kept == paragraph:
            paragraphs.append(" ".join(paragraph.split()))
        else:
            title, _, lines = kept.partition("\n")
            paragraphs.append(f"{title}\n\n```text\n{inspect.cleandoc(lines)}\n```")
    return "\n\n".join(paragraphs) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _option(text: str) -> str:
    """Returns an option for a code span, which must not contain the | that ends a cell."""
    return " ".join(text.split()).replace("int range", "int").replace("float range", "float").replace("|", ", ")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {"keys.md": keys_page, "cluster.md": cluster_page, "commands.md": commands_page}


def main(folder: Path) -> None:
    """Writes all pages into a folder."""
    for name, page in PAGES.items():
        (folder / name).write_text(page())
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
