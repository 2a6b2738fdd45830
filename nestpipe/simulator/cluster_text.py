"""Reads cluster files, and lists their keys."""

import tomllib
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from nestpipe.recipe.value import ConfigError, checked, literal, shown, suggestion, type_text
from nestpipe.simulator.cluster import ByWorkersSection, Cluster


def load_cluster(path: Path | None) -> Cluster:
    """Returns the default cluster, changed by a file. Raises ConfigError for a mistake in it."""
    if path is None:
        return Cluster()
    try:
        return parse_cluster(path.read_bytes().decode(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None


def parse_cluster(text: str, source: str) -> Cluster:
    """Reads a cluster. `source` names its origin in errors."""
    try:
        sections = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    hints = get_type_hints(Cluster)
    read = {}
    for name, entry in sections.items():
        if name not in hints:
            remedy = suggestion(name, tuple(hints)) or f"; the sections are {', '.join(hints)}"
            raise ConfigError(f"unknown section {literal(name)} in {source}{remedy}")
        if not isinstance(entry, dict):
            raise ConfigError(f"{name} in {source} is {shown(entry)}, must be a section: write [{name}]")
        read[name] = hints[name](**_values(name, hints[name], entry, f" in {source}"))
    cluster = Cluster(**read)
    _check(cluster, source)
    return cluster


def describe() -> list[tuple[str, str, str, str]]:
    """Returns section.key, type, default and meaning of every key."""
    return [
        (
            f"{name}.{field.name}",
            type_text(get_type_hints(section)[field.name], field.metadata["key"]),
            "not set" if field.default is None else literal(field.default),
            field.metadata["key"].meaning,
        )
        for name, section in get_type_hints(Cluster).items()
        for field in fields(section)
    ]


def _values(name: str, section: Any, entry: dict[str, object], source: str) -> dict[str, object]:
    keys = {field.name: field.metadata["key"] for field in fields(section)}
    hints = get_type_hints(section)
    for key in entry:
        if key not in keys:
            remedy = suggestion(key, tuple(keys), f"{name}.") or f"; the keys of {name} are {', '.join(keys)}"
            raise ConfigError(f"unknown key {name}.{key}{source}{remedy}")
    return {key: checked(f"{name}.{key}", source, hints[key], keys[key], value) for key, value in entry.items()}


def _check(cluster: Cluster, source: str) -> None:
    """Checks what concerns several keys."""
    section = cluster.by_workers
    for field in fields(ByWorkersSection):
        num = len(getattr(section, field.name))
        if num != len(section.workers):
            raise ConfigError(
                f"by_workers.{field.name} in {source} has {num} numbers, by_workers.workers has "
                f"{len(section.workers)}; give one for each number of workers"
            )
    if not section.workers or any(low >= high for low, high in pairwise(section.workers)):
        raise ConfigError(f"by_workers.workers in {source} must ascend and not be empty")
    if not cluster.run.workers:
        raise ConfigError(f"run.workers in {source} is empty; give at least one number of workers")
