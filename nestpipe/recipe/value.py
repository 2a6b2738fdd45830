"""Checks one value of a recipe against its key, and writes values as TOML and in errors."""

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from nestpipe.recipe.key import Key
from nestpipe.registry import RegistryError

# Words of error messages for a given value, and for the type that it must have.
_GIVEN = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
_WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string in quotes"}
_SINGULAR = {bool: "true or false", int: "integer", float: "number", str: "string"}
_PLURAL = {int: "integers", float: "numbers", str: "strings"}
_LIMITS: dict[str, Callable[[Any, float], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}
_LONGEST_SHOWN = 60


class ConfigError(ValueError):
    """A mistake in a recipe or in --set; its text is one line."""


def checked(name: str, source: str, hint: Any, key: Key, value: object) -> object:
    """Returns the value as its field holds it, or raises. `source` follows the name in errors."""
    hint = _kind_of(hint, value)
    if get_origin(hint) is tuple:
        return _checked_list(name, source, hint, key, value)
    if get_origin(hint) is Mapping:
        return _checked_args(name, source, value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{name}{source} is too large, must fit in 64 bits")
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:  # not isinstance, because a bool is an int
        wanted = (
            f"{_WANTED[hint]} or one of {', '.join(key.choices)}" if _is_number_or_choice(hint, key) else _WANTED[hint]
        )
        raise ConfigError(f"{name}{source} is {shown(value)}, must be {wanted}")
    if isinstance(value, str):
        _check_string(f"{name}{source}", key, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}{source} is {literal(value)}, must be finite")
    if not isinstance(value, str) and not all(_LIMITS[limit](value, bound) for limit, bound in _limits(key).items()):
        raise ConfigError(f"{name}{source} is {literal(value)}, must be {_limits_text(key)}")
    return value


def _checked_list(name: str, source: str, hint: Any, key: Key, value: object) -> tuple[object, ...]:
    length = _list_length(hint)
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ConfigError(f"{name}{source} is {shown(value)}, must be a {_list_text(hint)}")
    element = get_args(hint)[0]
    return tuple(checked(f"{name}[{i}]", source, element, key, part) for i, part in enumerate(value))


def _checked_args(name: str, source: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name}{source} is {shown(value)}, must be a section: write [{name}]")
    for key, entry in value.items():
        _check_plain(f"{name}.{key}", source, entry)
    return value


def _check_plain(name: str, source: str, value: object) -> None:
    """Refuses dates and times: a saved recipe must read back as it is."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_plain(name, source, part)
    elif type(value) not in _SINGULAR:
        raise ConfigError(f"{name}{source} is {shown(value)}, must be a string, a number, true, false or a list")


def _check_string(where: str, key: Key, value: str) -> None:
    if key.registry is not None and value:
        _check_registered(where, key, value)
    if key.choices and value not in key.choices:
        wanted = "one of " * (len(key.choices) > 1) + ", ".join(key.choices)
        wanted += f", or a number, {_limits_text(key)}" if _limits(key) else ""
        raise ConfigError(f"{where} is {literal(value)}, must be {wanted}{suggestion(value, key.choices)}")
    if not value:
        raise ConfigError(f"{where} is empty; give it a value, or leave it out")
    if "\0" in value or not _is_unicode(value):
        raise ConfigError(f"{where} is {literal(value)}, must have no NUL and be UTF-8")


def _check_registered(where: str, key: Key, value: str) -> None:
    assert key.registry is not None
    try:
        key.registry.find(value)
    except RegistryError as error:
        hint = suggestion(value, key.registry.names())
        raise ConfigError(f"{where}: {' '.join(str(error).split())}{hint}") from None


def _is_unicode(text: str) -> bool:
    """A byte of the command line that is not UTF-8 arrives as a lone surrogate, which cannot be written to a file."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def suggestion(given: str, known: tuple[str, ...], prefix: str = "") -> str:
    """Returns "; did you mean ...?" if a known name is close to the given one, else an empty string."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def literal(value: object) -> str:
    """Returns the value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one escape JSON does without
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(part) for part in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(key)} = {literal(part)}" for key, part in value.items()) + "}"
    return str(value)


def toml_key(name: str) -> str:
    """Quotes the name of a key unless TOML can do without."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else literal(name)


def shown(value: object) -> str:
    """Returns the value and its type, for errors."""
    if isinstance(value, dict):
        return "a section"
    text = literal(value)
    text = text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."
    return f"{text} ({_GIVEN.get(type(value), 'a date or time')})"


def type_text(hint: Any, key: Key) -> str:
    """Returns the type and limits of a key, for the list of all keys."""
    hint = _without_none(hint)
    if get_origin(hint) is Mapping:
        return "section"
    choices = key.choices if key.registry is None else (*key.registry.names(), "package.module:Class")
    if choices:
        text = " | ".join(literal(choice) for choice in choices)
        if _is_number_or_choice(hint, key):
            return f"{text} | {_SINGULAR[hint]}, {_limits_text(key)}"
        return f"list of {text}" if get_origin(hint) is tuple else text
    kind = _list_text(hint) if get_origin(hint) is tuple else _SINGULAR[hint]
    return ", ".join(text for text in (kind, _limits_text(key)) if text)


def _limits(key: Key) -> dict[str, float]:
    return {limit: bound for limit in _LIMITS if (bound := getattr(key, limit)) is not None}


def _limits_text(key: Key) -> str:
    return " and ".join(f"{limit.replace('_', ' ')} {bound}" for limit, bound in _limits(key).items())


def _list_length(hint: Any) -> int | None:
    arguments = get_args(hint)
    return None if arguments[-1] is ... else len(arguments)


def _list_text(hint: Any) -> str:
    length = _list_length(hint)
    return f"list of {'' if length is None else f'{length} '}{_PLURAL[get_args(hint)[0]]}"


def _is_number_or_choice(hint: Any, key: Key) -> bool:
    """Returns whether a key takes one of its choices, or a number instead."""
    return hint is int and bool(key.choices)


def _kind_of(hint: Any, value: object) -> Any:
    """Returns the type of a key that takes several, for this value."""
    is_union = isinstance(hint, UnionType)
    return type(value) if is_union and type(value) in get_args(hint) else _without_none(hint)


def _without_none(hint: Any) -> Any:
    """Returns the T of `T | None`. TOML has no null, so a given value is never None."""
    return next(part for part in get_args(hint) if part is not NoneType) if isinstance(hint, UnionType) else hint
