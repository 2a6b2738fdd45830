"""Prints the plan of a recipe."""

from rich.console import Console
from rich.table import Table

from nestpipe.cli.show import MEANINGS
from nestpipe.sizing.limits import gb
from nestpipe.sizing.need import DEVICE, HOST
from nestpipe.sizing.plan import Plan

NUM_LISTED = 8
"""Tables that are listed with their rows, the largest first; --json has all."""


def show_plan(plan: Plan, console: Console) -> None:
    console.print(_parts(plan))
    if not plan.case.trial.is_on_device:
        console.print("no accelerator: pool, lists, messages, dense part and activations are in host memory")
    tables = sorted(plan.case.tables, key=lambda table: -table.num_rows)
    for table in tables[:NUM_LISTED]:
        console.print(f"table {table.name}: {table.num_rows:,} rows, {table.origin}", highlight=False, soft_wrap=True)
    if len(tables) > NUM_LISTED:
        rest = sum(table.num_rows for table in tables[NUM_LISTED:])
        console.print(f"{len(tables) - NUM_LISTED} smaller tables: {rest:,} rows", highlight=False)
    _show_step(plan, console)
    console.print(
        f"largest table that fits: {plan.most_rows:,} rows of {plan.largest_table} on {plan.case.num_workers:,} "
        "workers, next to the other tables",
        highlight=False,
        soft_wrap=True,
    )


def _parts(plan: Plan) -> Table:
    title = f"memory of each of {plan.case.num_workers:,} workers"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("part", "where", "GB", "formula"):
        table.add_column(name, justify="right" if name == "GB" else "left", no_wrap=name != "formula")
    for part in plan.case.parts:
        table.add_row(part.name, part.place, gb(part.num_bytes), part.formula)
    for place in (HOST, DEVICE):
        limit, total = plan.limits.of(place), plan.case.total(place)
        if limit is not None and (place == HOST or plan.case.trial.is_on_device):
            fits = "fits" if total <= limit else "does not fit"
            table.add_row("total", place, gb(total), f"of {gb(limit)} GB: {fits}")
    return table


def _show_step(plan: Plan, console: Console) -> None:
    step, (field, share), (lane, busy) = plan.step, plan.step.limit, plan.step.busiest_lane
    console.print(
        f"expected step {step.result.step_ms:,.1f} ms, {step.samples_per_second:,.0f} samples/s of all workers, "
        f"schedule {plan.case.trial.config.pipeline.schedule}, micro-batches {step.num_micro_batches}; limited by "
        f"{MEANINGS[field]}, {share:.0%} of it; busiest lane: {lane}, {busy:.0%}",
        highlight=False,
        soft_wrap=True,
    )
