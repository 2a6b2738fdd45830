"""Tables of `nestpipe simulate`."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from nestpipe.prediction.result import Result
from nestpipe.prediction.work import Way
from nestpipe.simulator.cluster_text import describe
from nestpipe.simulator.fit import Fitted
from nestpipe.simulator.simulate import Record

LANES = ("compute", "host", "route", "rows", "gradients")
"""Lanes whose utilisation is printed; --json has all."""


def records_table(records: Sequence[Record]) -> Table:
    """Returns a table of all ways with one number of workers. Of look-up and exchange it has the exposed time."""
    table = Table(title=f"{records[0]['workers']:,} workers", title_justify="left", box=None, pad_edge=False)
    table.add_column("way", no_wrap=True)
    for name in ("step ms", "dense", "look-up", "exchange", *LANES, "samples/s", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        times = ("step_ms", "dense_ms", "exposed_lookup_ms", "exposed_exchange_ms")
        table.add_row(
            str(record["way"]),
            *(f"{record[name]:,.1f}" for name in times),
            *(f"{record[f'busy_share_{lane}']:.0%}" for lane in LANES),
            f"{record['samples_per_second']:,.0f}",
            f"{record['scaling_efficiency']:.1%}",
        )
    return table


def predictions_table(predicted: Mapping[tuple[Way, int], Result], fits: Sequence[Fitted]) -> Table:
    """Returns a table of ways of training on the machine of traces."""
    table = Table(box=None, pad_edge=False)
    table.add_column("way", no_wrap=True)
    for name in ("micro-batches", "step ms", "dense", "look-up", "exchange", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    fewest = min(fitted.num_micro_batches for fitted in fits)
    serial_ms = next(r.step_ms for (way, num), r in predicted.items() if way.schedule == "serial" and num == fewest)
    for (way, number), result in predicted.items():
        parts = (result.parts[name] for name in ("dense_ms", "exposed_lookup_ms", "exposed_exchange_ms"))
        table.add_row(
            way.name,
            str(number),
            *(f"{ms:,.1f}" for ms in (result.step_ms, *parts)),
            f"{serial_ms / result.step_ms:.2f}",
        )
    return table


def keys_table() -> Table:
    table = Table("key", "type", "default", "meaning")
    for row in describe():
        table.add_row(*(text.replace("[", "\\[") for text in row))
    return table
