"""Recipes as text: reads TOML and --set, writes TOML, lists all keys."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from nestpipe.recipe.config import RETIRED, Config, TableSection
from nestpipe.recipe.value import ConfigError, checked, literal, shown, suggestion, toml_key, type_text


def load_config(path: Path | None, settings: Sequence[str] = ()) -> Config:
    """Returns the defaults, changed by the recipe, then by the settings "section.key=value" in order."""
    config = _config(_parse(path), f" in {path}") if path is not None else Config()
    return change_config(config, settings)


def parse_config(text: str, source: str) -> Config:
    """Reads a recipe. `source` names its origin in errors."""
    try:
        return _config(tomllib.loads(text), f" in {source}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None


def change_config(config: Config, settings: Sequence[str]) -> Config:
    for setting in settings:
        config = _set(config, setting)
    return config


def to_toml(config: Config) -> str:
    """Returns a recipe that reads back as this config. Keys that are None are left out: TOML has no null."""
    blocks: list[str] = []
    for name in _sections():
        value = getattr(config, name)
        if name == "tables":
            blocks += [_block("[[tables]]", _values(table)) for table in value]
        else:
            blocks += _blocks(name, _values(value))
    return "\n".join(blocks)


def _values(section: Any) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in fields(section)}


def _blocks(name: str, values: dict[str, Any]) -> list[str]:
    """Returns a section and, after it, the sections in it, such as [model.args], if they have keys."""
    inner = {key: value for key, value in values.items() if isinstance(value, dict)}
    plain = {key: value for key, value in values.items() if key not in inner}
    return [_block(f"[{name}]", plain), *(_block(f"[{name}.{key}]", value) for key, value in inner.items() if value)]


def _block(header: str, values: dict[str, Any]) -> str:
    lines = [f"{toml_key(key)} = {literal(value)}" for key, value in values.items() if value is not None]
    return "\n".join([header, *lines, ""])


def describe() -> list[tuple[str, str, str, str]]:
    """Returns section.key, type, default and meaning of every key."""
    return [
        (f"{name}.{key}", type_text(hint, field.metadata["key"]), _default_text(field), field.metadata["key"].meaning)
        for name, section in _sections().items()
        for key, (field, hint) in _keys(section).items()
    ]


def _default_text(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required" if field.default_factory is MISSING else "empty"
    return "not set" if field.default is None else literal(field.default)


def _sections() -> dict[str, Any]:
    """Returns the dataclass of each section; for tables, that of one table."""
    hints = get_type_hints(Config)
    return {**hints, "tables": get_args(hints["tables"])[0]}


def _keys(section: Any) -> dict[str, tuple[Field[Any], Any]]:
    """Returns the field and the type hint of each key."""
    hints = get_type_hints(section)
    return {field.name: (field, hints[field.name]) for field in fields(section)}


def _config(sections: dict[str, Any], source: str) -> Config:
    values: dict[str, Any] = {}
    for name, entry in sections.items():
        section = _section(name, tuple(_sections()), source)
        if name == "tables":
            values[name] = _read_tables(entry, source)
        else:
            values[name] = _read_section(name, section, entry, source, header=f"[{name}]")
    return Config(**values)


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {path}; give the path of a TOML file") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # tomllib lets a few of its own through
        remedy = "correct it, or restore the file if it is cut off"
        raise ConfigError(f"{path} is not valid TOML: {error}; {remedy}") from None


def _read_tables(entries: object, source: str) -> tuple[TableSection, ...]:
    if not isinstance(entries, list):
        raise ConfigError(f"tables{source} is {shown(entries)}, must be a list of sections: write [[tables]]")
    tables: dict[str, TableSection] = {}
    for i, entry in enumerate(entries):
        table: TableSection = _read_section(f"tables[{i}]", TableSection, entry, source, header="[[tables]]")
        if table.name in tables:
            raise ConfigError(f"two tables{source} have the name {literal(table.name)}; make them one, or rename one")
        tables[table.name] = table
    return tuple(tables.values())


def _read_section(name: str, section: Any, entry: object, source: str, header: str) -> Any:
    if not isinstance(entry, dict):
        raise ConfigError(f"{name}{source} is {shown(entry)}, must be a section: write {header}")
    values = {
        key: _read_value(name, section, key, value, source)
        for key, value in entry.items()
        if not _is_retired(name, key, value, source)
    }
    for key, (field, _) in _keys(section).items():
        if key not in entry and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{name}{source} has no {key}; add {key} = ...")
    return section(**values)


def _is_retired(name: str, key: str, value: object, source: str) -> bool:
    """A saved recipe of an earlier version has all keys. A retired one may have its default, but no other value."""
    full_name = f"{name}.{key}"
    if full_name not in RETIRED:
        return False
    if value != RETIRED[full_name]:
        raise ConfigError(
            f"{full_name}{source} is {shown(value)}, but there is no such key any more; leave it out, which means what "
            f"{literal(RETIRED[full_name])} meant"
        )
    return True


def _read_value(name: str, section: Any, key: str, value: object, source: str) -> object:
    keys = _keys(section)
    if key not in keys:
        remedy = suggestion(key, tuple(keys), f"{name}.") or f"; the keys of {name} are {', '.join(keys)}"
        raise ConfigError(f"unknown key {name}.{_on_one_line(key)}{source}{remedy}")
    field, hint = keys[key]
    return checked(f"{name}.{key}", source, hint, field.metadata["key"], value)


def _section(name: str, known: tuple[str, ...], source: str) -> Any:
    if name not in known:
        remedy = suggestion(name, known) or f"; the sections are {', '.join(known)}"
        raise ConfigError(f"unknown section {_on_one_line(name)}{source}{remedy}")
    return _sections()[name]


def _set(config: Config, setting: str) -> Config:
    left, equals, text = setting.partition("=")
    name, _, key = (part.strip() for part in left.partition("."))
    if name == "tables":
        raise ConfigError(f"--set {literal(setting)}: tables cannot be set here; write [[tables]] in a recipe")
    if not (equals and name and key):
        raise ConfigError(f"--set {literal(setting)} is not section.key=value; write it like train.steps=300")
    section = _section(name, tuple(known for known in _sections() if known != "tables"), " of --set")
    outer, _, inner = key.partition(".")
    given: object = _value(text.strip())
    if isinstance(args := getattr(getattr(config, name), outer, None), dict) and inner:
        key, given = outer, {**args, inner: given}  # one key of a section in a section: model.args.hidden=64
    value = _read_value(name, section, key, given, " of --set")
    return replace(config, **{name: replace(getattr(config, name), **{key: value})})


def _value(text: str) -> object:
    """Parses a TOML value; other text is a string, so that strings need no quotes on a command line."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text  # a text of several lines may be more than a value


def _on_one_line(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name) else literal(name)
