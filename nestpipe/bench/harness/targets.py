"""Reads the targets in benchmarks/targets.toml, and finds those that records miss."""

import ast
import dataclasses
import operator
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from nestpipe.bench.harness.report import Record

TARGETS = Path(__file__).parents[3] / "benchmarks" / "targets.toml"

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max}


@dataclasses.dataclass(frozen=True)
class Target:
    """`field op value` must hold in every record that has the field and agrees with `where`."""

    bench: str
    field: str
    op: str
    value: float | str
    """Number, or formula of other fields of the same record."""
    where: dict[str, int | float | str | bool] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op not in _COMPARE:
            raise ValueError(f"target {self.bench}/{self.field}: op {self.op!r} is none of {', '.join(_COMPARE)}")

    def __str__(self) -> str:
        where = ", ".join(f"{name} = {value}" for name, value in self.where.items())
        return f"{self.field} {self.op} {self.value}" + (f" ({where})" if where else "")

    def applies_to(self, record: Record) -> bool:
        return self.field in record and all(record.get(name) == value for name, value in self.where.items())

    def limit(self, record: Record) -> float:
        return evaluate(self.value, record) if isinstance(self.value, str) else self.value

    def is_met(self, record: Record) -> bool:
        return _COMPARE[self.op](_number(record, self.field), self.limit(record))


def load_targets(bench: str, path: Path = TARGETS) -> list[Target]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: targets come with the source tree; run from a clone")
    targets = [Target(**entry) for entry in tomllib.loads(path.read_text())["target"]]
    return [target for target in targets if target.bench == bench]


def find_misses(targets: Iterable[Target], records: list[Record]) -> list[str]:
    """Returns a line for each record that misses a target, and for each target that no record answers."""
    misses = []
    for target in targets:
        answers = [record for record in records if target.applies_to(record)]
        if not answers:
            misses.append(f"{target}: no record answers it")
        for record in answers:
            if not target.is_met(record):
                got = f"{_number(record, target.field):.4g} against {target.limit(record):.4g}"
                misses.append(f"{target}: got {got} in {dict(record)}")
    return misses


def evaluate(formula: str, record: Record) -> float:
    """Computes a formula of numbers, names of fields, + - * /, parentheses, min(...) and max(...)."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            return _FUNCTIONS[node.func.id](*map(value, node.args))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.Name):
            return _number(record, node.id)
        raise ValueError(f"formula {formula!r}: only numbers, fields, + - * /, parentheses, min and max are understood")

    return value(ast.parse(formula, mode="eval").body)


def _number(record: Record, name: str) -> float:
    if name not in record:
        raise ValueError(f"there is no field {name!r} in the record {dict(record)}")
    number = record[name]
    if isinstance(number, bool | str):
        raise ValueError(f"field {name!r} is {number!r}, not a number")
    return float(number)
