"""One value of a recipe: whether its key takes it, and how it is written."""

import difflib
import json
import math
import operator
from collections.abc import Callable
from types import NoneType
from typing import Any, get_args, get_origin

from nestpipe.recipe.config import Key

# What a value is called that was given, and what it must be instead.
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
    """The value as its field holds it; `source` follows the name in errors."""
    hint = _without_none(hint)
    if get_origin(hint) is tuple:
        return _checked_list(name, source, hint, key, value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{name}{source} is too large, must fit in 64 bits")
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:  # exactly: a bool is no integer
        raise ConfigError(f"{name}{source} is {shown(value)}, must be {_WANTED[hint]}")
    if isinstance(value, str):
        _check_string(f"{name}{source}", key, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}{source} is {literal(value)}, must be finite")
    if not all(_LIMITS[limit](value, bound) for limit, bound in _limits(key).items()):
        raise ConfigError(f"{name}{source} is {literal(value)}, must be {_limits_text(key)}")
    return value


def _checked_list(name: str, source: str, hint: Any, key: Key, value: object) -> tuple[object, ...]:
    length = _list_length(hint)
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ConfigError(f"{name}{source} is {shown(value)}, must be a {_list_text(hint)}")
    element = get_args(hint)[0]
    return tuple(checked(f"{name}[{i}]", source, element, key, part) for i, part in enumerate(value))


def _check_string(where: str, key: Key, value: str) -> None:
    if key.choices and value not in key.choices:
        wanted = "one of " * (len(key.choices) > 1) + ", ".join(key.choices)
        raise ConfigError(f"{where} is {literal(value)}, must be {wanted}{suggestion(value, key.choices)}")
    if not value:
        raise ConfigError(f"{where} is empty; give it a value, or leave it out")
    if "\0" in value or not _is_unicode(value):
        raise ConfigError(f"{where} is {literal(value)}, must have no NUL and be UTF-8")


def _is_unicode(text: str) -> bool:
    """A byte of the command line that is no UTF-8 arrives as a lone surrogate, which no file could hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def suggestion(given: str, known: tuple[str, ...], prefix: str = "") -> str:
    """ "; did you mean ...?" if one of those known is close to what was given, else nothing."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def literal(value: object) -> str:
    """As TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one escape JSON does without
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(part) for part in value) + "]"
    return "{...}" if isinstance(value, dict) else str(value)


def shown(value: object) -> str:
    """As errors show it: the value and what it is."""
    if isinstance(value, dict):
        return "a section"
    text = literal(value)
    text = text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."
    return f"{text} ({_GIVEN.get(type(value), 'a date or time')})"


def type_text(hint: Any, key: Key) -> str:
    """What a key takes, for a list of all keys."""
    hint = _without_none(hint)
    if key.choices:
        return " | ".join(literal(choice) for choice in key.choices)
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


def _without_none(hint: Any) -> Any:
    """The T of `T | None`: TOML has no null, so what is given is never None."""
    parts = get_args(hint)
    return next(part for part in parts if part is not NoneType) if NoneType in parts else hint
