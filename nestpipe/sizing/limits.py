"""Whether a recipe fits on its workers, the largest table that does, and what would make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nestpipe.recipe.value import ConfigError
from nestpipe.registry import optimizers
from nestpipe.sizing.need import DEVICE, HOST, Case
from nestpipe.store.interface import MOST_ROWS

MOST_WORKERS = 2**16
GB = 1e9


@dataclass(frozen=True)
class Limits:
    """Memory of a worker."""

    host_bytes: float
    device_bytes: float | None = None
    """None without an accelerator."""

    def of(self, place: str) -> float | None:
        return self.host_bytes if place == HOST else self.device_bytes


def problems(case: Case, limits: Limits) -> list[str]:
    """Returns why a recipe does not fit, in words; empty if it does."""
    found = []
    for place in (HOST, DEVICE):
        limit, needed = limits.of(place), case.total(place)
        if limit is not None and needed > limit:
            largest = max((part for part in case.parts if part.place == place), key=lambda part: part.num_bytes)
            found.append(
                f"a worker needs {gb(needed)} GB of {place} memory and has {gb(limit)}; most of it is {largest.name}, "
                f"{gb(largest.num_bytes)} GB"
            )
    if case.device_budget_bytes is not None and case.embedding_bytes > case.device_budget_bytes:
        found.append(
            f"embeddings need {gb(case.embedding_bytes)} GB of device memory and memory.device_budget_bytes is "
            f"{gb(case.device_budget_bytes)}"
        )
    if case.trial.is_overlapping and (case.resident_bytes or case.least_pool_bytes) < case.least_pool_bytes:
        found.append(
            f"the batches in flight need {gb(case.least_pool_bytes)} GB of resident rows and memory.resident_bytes is "
            f"{gb(case.resident_bytes or 0)}"
        )
    for table in case.tables:
        if table.num_rows > MOST_ROWS * case.num_shards:
            found.append(f"table {table.name} has {table.num_rows:,} rows; a worker holds at most {MOST_ROWS:,}")
    return found


def fits(case: Case, limits: Limits) -> bool:
    return not problems(case, limits)


def largest_table(case: Case) -> str:
    """Returns the name of the table with the most bytes."""
    return max(case.tables, key=lambda table: table.num_rows * table.record_bytes).name


def most_rows(case: Case, limits: Limits) -> int:
    """Returns the most rows, over all workers, that the largest table may have next to the others; 0 if none fit."""
    name = largest_table(case)
    return _most(MOST_ROWS * case.num_shards, lambda rows: fits(case.with_rows(name, rows), limits))


def remedies(case: Case, limits: Limits) -> list[str]:
    """Returns changes of which each alone would make the recipe fit. Only more memory may be left."""
    found = [remedy for make in REMEDIES for remedy in make(case, limits)]
    needed = [f"{gb(case.total(HOST), 1)} GB of host memory"]
    if limits.device_bytes is not None:
        needed.append(f"{gb(case.total(DEVICE), 1)} GB of device memory")
    if any(case.total(place) > (limits.of(place) or float("inf")) for place in (HOST, DEVICE)):
        found.append(f"workers with {' and '.join(needed)}")
    return found


def _more_workers(case: Case, limits: Limits) -> Iterator[str]:
    """Tries more workers with the same rows in all, and the same batch of each."""
    size = case.num_shards + 1  # of a group
    num = _least(
        size, MOST_WORKERS // case.replicas, lambda n: fits(replace(case, num_workers=n * case.replicas), limits)
    )
    if num is not None:
        yield f"--workers {num * case.replicas}"


def _fewer_replicas(case: Case, limits: Limits) -> Iterator[str]:
    for replicas in range(case.replicas - 1, 0, -1):
        if case.num_workers % replicas == 0 and fits(replace(case, replicas=replicas), limits):
            yield f"exchange.replicas = {replicas} instead of {case.replicas}"
            return


def _fewer_rows(case: Case, limits: Limits) -> Iterator[str]:
    name = largest_table(case)
    rows = most_rows(case, limits)
    if rows // case.num_shards > 0 and rows < next(t.num_rows for t in case.tables if t.name == name):
        yield f"max_rows = {rows // case.num_shards} for table {name}, {rows:,} rows in all"


def _smaller_dim(case: Case, limits: Limits) -> Iterator[str]:
    """Activations count as before: what a smaller model saves is not measured."""
    dim = max(table.dim for table in case.tables)
    smaller = _most(dim - 1, lambda new: fits(_with_dim(case, new), limits))
    if smaller > 0:
        yield f"model.dim = {smaller} instead of {dim}"


def _with_dim(case: Case, dim: int) -> Case:
    """Returns the case with rows of another dim. State that is as wide as the row stays so."""
    tables = [
        replace(t, dim=dim, state_width=t.state_width * dim // t.dim if t.state_width >= t.dim else t.state_width)
        for t in case.tables
    ]
    return replace(case, tables=tuple(tables))


def _less_state(case: Case, limits: Limits) -> Iterator[str]:
    """Tries the row optimizers that nestpipe has, the one with the most state first."""
    present = max(table.state_width for table in case.tables)
    widths = {}
    for entry in optimizers.entries():
        if entry.is_shipped:
            widths[entry.name] = entry.value(0.1).state_width(case.tables[0].dim)
    for name, width in sorted(widths.items(), key=lambda pair: (-pair[1], pair[0])):
        tables = tuple(replace(t, state_width=min(width, t.state_width)) for t in case.tables)
        if width < present and fits(replace(case, tables=tables), limits):
            yield f'row_optimizer.kind = "{name}", with {width} numbers of state for a row instead of {present}'
            return


def _smaller_batch(case: Case, limits: Limits) -> Iterator[str]:
    size = case.trial.batch_size
    smaller = _most(size - 1, lambda new: fits(replace(case, batch_scale=new / size), limits))
    if smaller > 0:
        yield f"train.batch_size = {smaller} instead of {size}"


def _other_pool(case: Case, limits: Limits) -> Iterator[str]:
    if case.resident_bytes is None or not case.trial.is_overlapping:
        return
    least = int(case.least_pool_bytes) + 1
    top = max(case.resident_bytes, least)
    most = _most(top, lambda new: new < least or fits(replace(case, resident_bytes=new), limits))
    if most >= least:
        yield f"memory.resident_bytes = {most}"


def _other_budget(case: Case, limits: Limits) -> Iterator[str]:
    if case.device_budget_bytes is not None:
        budget = int(case.embedding_bytes) + 1
        if budget > case.device_budget_bytes and fits(replace(case, device_budget_bytes=budget), limits):
            yield f"memory.device_budget_bytes = {budget}"


REMEDIES: tuple[Callable[[Case, Limits], Iterator[str]], ...] = (
    *(
        _more_workers,
        _fewer_replicas,
        _fewer_rows,
        _smaller_dim,
        _less_state,
        _smaller_batch,
        _other_pool,
        _other_budget,
    ),
)


def check_limits(is_on_device: bool, limits: Limits) -> None:
    if is_on_device and limits.device_bytes is None:
        raise ConfigError("the recipe trains on an accelerator; give the memory of one as --device-memory, in GB")


def gb(num_bytes: float, digits: int = 3) -> str:
    """Returns gigabytes; rounded up with 1 digit, so that what fits is enough."""
    if digits == 1:
        return f"{int(num_bytes / GB * 10) / 10 + 0.1:,.1f}"
    return f"{num_bytes / GB:,.{digits}f}"


def _most(most: int, holds: Callable[[int], bool]) -> int:
    """Returns the largest number from 1 to `most` for which something holds that fails for all larger ones; else 0."""
    if most < 1 or holds(most):
        return max(0, most)
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _least(first: int, most: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the smallest number from `first` on for which something holds that holds for all larger ones, too."""
    if first > most or not holds(most):
        return None
    low, high = first - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
