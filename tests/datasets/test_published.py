"""Published data sets register themselves in their own files, cheaply.

Fails, for example, if prepare.py or generate.py has a list of formats of its own, or if kuairand.py imports pyarrow.
"""

import sys
from pathlib import Path

import pytest

import nestpipe.datasets
from nestpipe import registry
from nestpipe.datasets import published
from nestpipe.datasets.generate import generate
from nestpipe.datasets.published import Published, published_formats

RECIPE_NAMES = {
    "criteo": ("criteo-kaggle", "criteo-terabyte"),
    "kuairand": ("kuairand-27k", "kuairand-1k", "kuairand-pure"),
    "movielens": ("movielens-1m", "movielens-20m"),
}
OWN_FILE = """
from nestpipe.datasets.published import Published, register

def write(folder, num_rows, seed, variant):
    (folder / variant).write_text("x" * num_rows)
    return [folder / variant]

register(Published("news", ("small", "large"), "clicks", "News: clicks on headlines.", None, None, write))
"""


def test_names_in_recipes() -> None:
    assert {name: one.recipe_names for name, one in published_formats().items()} == RECIPE_NAMES
    for name, recipe_names in RECIPE_NAMES.items():
        for recipe_name in recipe_names:
            entry = registry.datasets.find(recipe_name)
            assert entry.value is published_formats()[name]
            assert entry.is_shipped
    assert {name: one.samples for name, one in published_formats().items()} == {
        "criteo": "clicks",
        "kuairand": "histories",
        "movielens": "histories",
    }


def test_each_has_a_summary_of_its_own() -> None:
    published_formats()
    assert registry.datasets.find("kuairand-1k").summary == "KuaiRand: histories of watched videos"
    assert registry.datasets.find("movielens-1m").summary == "MovieLens: histories of rated movies"
    assert (Published.__doc__ or "").startswith("A published data set:")


def test_a_new_data_set_needs_its_own_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published_formats()
    monkeypatch.setattr(nestpipe.datasets, "__path__", [*nestpipe.datasets.__path__, str(tmp_path)])
    monkeypatch.setattr(published, "_formats", dict(published._formats))
    monkeypatch.setattr(registry.datasets, "_entries", dict(registry.datasets._entries))
    (tmp_path / "news.py").write_text(OWN_FILE)
    try:
        assert list(published_formats()) == [*RECIPE_NAMES, "news"]
        (file,) = generate("news", tmp_path / "files", 3)
        assert (file.name, file.read_text()) == ("small", "xxx")
        assert registry.datasets.find("news-large").summary == "News: clicks on headlines"
        with pytest.raises(registry.RegistryError, match="two datasets are called 'news-small'"):
            published.register(published_formats()["news"])
    finally:
        sys.modules.pop("nestpipe.datasets.news", None)
