"""Tables and the features that look into them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from nestpipe.embedding.optim import SGD, RowOptimizer, check_row_optimizer
from nestpipe.store import HostStore, Store, TableSpec
from nestpipe.store.init import Distribution, Normal

AUTO = "auto"
PLACEMENTS = ("sharded", "replicated")
POOLING_PLACES = ("requester", "owner")


@dataclass(frozen=True)
class Table:
    """A named set of rows of one dimension. Rows exist from the first step that uses them."""

    name: str
    dim: int
    init: Distribution = field(default_factory=lambda: Normal(0.02))
    optimizer: RowOptimizer = field(default_factory=lambda: SGD(0.01))
    """Tables with equal row optimizers are updated together. The optimizer is read when training starts; for a learning
    rate that changes, give it a function of the step."""
    num_keys: int | None = None
    """Keys must be 0 .. num_keys - 1; with None, any int64 is a key."""
    frozen: bool = False
    """True if rows are never updated; a key that was not imported keeps its initial row."""
    dtype: torch.dtype = torch.float32
    max_rows: int | None = None
    placement: str = "sharded"
    """"sharded" if each row is on one rank. "replicated" if every rank keeps all rows, which then never travel: for
    small tables of which most batches use most keys. The result is the same, bit for bit. "auto": a Trainer chooses,
    from its first batch."""

    def __post_init__(self) -> None:
        self.spec(seed=0)
        check_row_optimizer(self.optimizer, self.dim)
        self._check_placement()
        if self.num_keys is not None and self.num_keys < 1:
            raise ValueError(f"table {self.name!r}: num_keys is {self.num_keys}, must be at least 1")

    def _check_placement(self) -> None:
        where = f"table {self.name!r}: placement"
        if self.placement not in (*PLACEMENTS, AUTO):
            choices = ", ".join(map(repr, (*PLACEMENTS, AUTO)))
            raise ValueError(f"{where} is {self.placement!r}, must be one of {choices}")
        if self.placement == "replicated" and not self.frozen and not self.optimizer.updates_in_parts:
            raise ValueError(
                f'{where} "replicated" needs a row optimizer that treats each row alone; if '
                f"{type(self.optimizer).__name__} does, set can_update_in_parts = True in its class"
            )

    def spec(self, seed: int) -> TableSpec:
        """Returns the table as the store needs it."""
        width = 0 if self.frozen else self.optimizer.state_width(self.dim)
        return TableSpec(
            name=self.name,
            dim=self.dim,
            state_width=width,
            initial_state=() if self.frozen else self.optimizer.initial_state(self.dim),
            init=self.init,
            dtype=self.dtype,
            seed=seed,
            max_rows=self.max_rows,
        )


@dataclass(frozen=True)
class Sequence:
    """A feature whose rows reach the model one by one, in the order of its keys."""

    table: Table
    padding_key: int | None = None
    """Key that stands for padding: it gets zeros, and has no row."""
    by_index: bool = False
    """True if the model reads `rows` and `index` of this feature instead of `values`. On an accelerator, the values of
    all other sequences of a table group are gathered together as soon as the model reads one of them."""


@dataclass(frozen=True)
class Pooled:
    """A feature whose rows are added up for each sample, weighted if the batch has weights; zeros without keys."""

    table: Table
    mode: str = "sum"
    """"sum", or "mean": the sum divided by the sum of the weights (by the number of keys without them)."""
    padding_key: int | None = None
    where: str = "requester"
    """"requester" if rows travel and the rank that has the sample adds them up. "owner" if each owner adds up its rows
    of a sample, and sends the sum: for many keys a sample. The result differs by rounding. "auto": a Trainer chooses,
    from its first batch."""

    def __post_init__(self) -> None:
        what = f"a pooled feature of table {self.table.name!r}"
        if self.mode not in ("sum", "mean"):
            raise ValueError(f"{what} has mode {self.mode!r}: 'sum' or 'mean'")
        if self.where not in (*POOLING_PLACES, AUTO):
            choices = ", ".join(map(repr, (*POOLING_PLACES, AUTO)))
            raise ValueError(f"{what} has where = {self.where!r}, must be one of {choices}")
        if self.where == "owner" and self.table.placement == "replicated":
            raise ValueError(
                f'{what} has where = "owner", but no row of a replicated table travels; leave out `where`, or set '
                'placement = "sharded"'
            )


Feature = Sequence | Pooled


def tables_of(features: Mapping[str, Feature]) -> list[Table]:
    """Returns the tables of these features, sorted by name. Refuses two different tables of one name."""
    tables: dict[str, Table] = {}
    for name, feature in features.items():
        table = tables.setdefault(feature.table.name, feature.table)
        if table is not feature.table:
            raise ValueError(
                f"feature {name!r} has a table {table.name!r} that is not the one other features have under this "
                "name; share one Table object, or give it another name"
            )
    return [tables[name] for name in sorted(tables)]


def make_store(
    tables: Iterable[Table], seed: int, num_threads: int, new_store: Callable[[int], Store] = HostStore
) -> Store:
    """Returns an empty store with these tables. new_store: makes a store, given its number of threads."""
    store = new_store(num_threads)
    for table in tables:
        store.create_table(table.spec(seed))
    return store
