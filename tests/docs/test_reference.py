"""Generated pages are current, and the table of summary fields is complete."""

import re
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.cli.reference import PAGES
from nestpipe.recipe.run import run
from nestpipe.recipe.text import parse_config
from tests.docs.blocks import DOCS
from tests.docs.surroundings import RECIPE


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    """`make reference` writes them. Fails if a key or an option is added without it."""
    assert (DOCS / "reference" / name).read_text() == PAGES[name]()


def test_every_field_of_the_summary_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a field is added to the summary, and not to docs/why-slow.md with what moves it."""
    monkeypatch.chdir(tmp_path)
    config = parse_config(RECIPE + "\n[model]\ndim = 4\n[runtime]\ndevice = 'cpu'\ndense_threads = 1\n", "the test")
    summary = run(config.resolved(1, 1), World())
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", (DOCS / "why-slow.md").read_text(), re.MULTILINE)
    explained = [name for name, *_ in rows]
    assert sorted(set(summary) - set(explained)) == []
    assert sorted(name for name in set(explained) if explained.count(name) > 1) == []


def test_every_key_that_moves_a_field_exists() -> None:
    """Fails if a recipe key is renamed, and docs/why-slow.md keeps the old name."""
    keys = set(re.findall(r"^\| `([a-z_]+\.\w+)` \|", (DOCS / "reference" / "keys.md").read_text(), re.MULTILINE))
    sections = {key.split(".")[0] for key in keys}
    for page in ("why-slow.md", "scaling.md", "tutorial.md", "limits.md"):
        named = re.findall(r"`([a-z_]+)\.(?!json`)(\w+)(?: = [^`]*)?`", (DOCS / page).read_text())
        unknown = [
            f"{section}.{key}" for section, key in named if section in sections and f"{section}.{key}" not in keys
        ]
        assert unknown == [], page
