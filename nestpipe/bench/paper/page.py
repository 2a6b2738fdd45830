"""The page of `bench paper`: a table for each published one, with the results of H200 machines that are on record."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nestpipe.bench.harness.plot import Series, strip_plot
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.requirements import SOURCE_TREE
from nestpipe.bench.paper.published import COUNTERPARTS, DENSE_MS, NESTED, NO_COUNTERPART, SERIAL, System
from nestpipe.bench.paper.texts import END, END_TO_END, HEAD, MICRO_BATCHES, OVER_DENSE, RANKS, ROBUSTNESS, SHARES
from nestpipe.bench.paper.workload import BASE

RESULTS = SOURCE_TREE / "benchmarks" / "results"
PAGE, PICTURE = "paper.md", "paper.svg"
NOTHING = ""
"""Cell of a figure that is not published, or not measured."""
PARTS = ("lookup", "exchange")
SIZES = {"dim": "row dim", "num_layers": "layers", "length": "sequence length"}


@dataclass(frozen=True)
class Figures:
    """What the page shows: records of `bench paper`, and those on record of `bench h200`."""

    measured: Sequence[Record]
    four_ranks: Sequence[Record] = ()
    robustness: Sequence[Record] = ()
    one_rank: Sequence[Record] = ()

    def here(self, table: str, **conditions: object) -> Record | None:
        return _find(self.measured, table=table, **conditions)

    def schedule_on_h200(self, system: System) -> Record | None:
        """Returns the record of four ranks on an H200. Stale rows were not measured there."""
        if system.stale or not system.schedule:
            return None
        many = {} if system.schedule in ("intra", "nested") else {"num_micro_batches": 1}
        return _find(self.four_ranks, recipe="published", schedule=system.schedule, deterministic=False, **many)


def write(folder: Path, records: Sequence[Record]) -> None:
    """Writes the page and its picture."""
    for name, text in files(records).items():
        (folder / name).write_text(text)


def files(records: Sequence[Record] | None = None, results: Path = RESULTS) -> dict[str, str]:
    """Returns the texts of the page and of its picture, by file name. Without records, those in `results` are shown."""
    measured = _recorded(results, "paper") if records is None else records
    h200 = [_recorded(results, f"h200-{part}") for part in ("four-ranks", "robustness", "one-rank")]
    figures = Figures(measured, *h200)
    return {PAGE: text(figures), PICTURE: picture(figures)}


def text(figures: Figures) -> str:
    sections = [
        HEAD,
        END_TO_END,
        _table(
            "published system|here|published step|times as fast|2 ranks: step|times as fast|H200: step|times as fast"
            "|what differs",
            [_end_to_end_row(figures, system) for system in (*COUNTERPARTS, *NO_COUNTERPART)],
        ),
        f"![Times as fast as without overlap]({PICTURE})",
        OVER_DENSE,
        _table("nested|published|2 ranks|1 rank|H200, one rank", _over_dense_rows(figures)),
        SHARES,
        _table(
            "|lookup: published|2 ranks|H200|exchange: published|2 ranks|H200",
            [_shares_row(figures, system) for system in COUNTERPARTS[1:]],
        ),
        MICRO_BATCHES,
        _table(
            "samples of a micro-batch|order of samples|window|bytes|published exchange time|exchange time"
            "|exposed exchange|times as fast",
            [_split_row(record) for record in figures.measured if record["table"] == "micro_batches"],
        ),
        ROBUSTNESS,
        _table(
            "varied|published range|2 ranks: value|step over dense|against the base|times as fast as serial"
            "|H200: value|step over dense|against the base",
            _robustness_rows(figures),
        ),
        RANKS,
        _table(
            "|published, 1,536 against 128|1 rank: step|2 ranks|4 ranks|efficiency of 2|efficiency of 4",
            [_ranks_row(figures, system) for system in COUNTERPARTS if system.efficiency is not None],
        ),
        END,
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def picture(figures: Figures) -> str:
    """Draws how many times as fast as serial each way of training is."""
    systems = [system for system in COUNTERPARTS if system is not SERIAL]
    names = ["stale prefetch" if system.stale else system.schedule for system in systems]
    here = [_values(figures.here("end_to_end", schedule=s.schedule, stale=s.stale)) for s in systems]
    h200 = [_values(figures.schedule_on_h200(system)) for system in systems]
    series = [Series("published, 1,536 accelerators", [[system.speedup] for system in systems])]
    series += [Series("2 ranks, link of 1 Gbit/s, paced compute", here)] if any(here) else []
    series += [Series("4 ranks on one H200", h200)] if any(h200) else []
    return strip_plot("Times as fast as training without overlap", "times as fast", names, series)


def _end_to_end_row(figures: Figures, system: System) -> list[str]:
    here = figures.here("end_to_end", schedule=system.schedule, stale=system.stale) if system.schedule else None
    cells = [system.name, _way(system), f"{system.step_ms:,.0f} ms", f"{system.speedup:.2f}"]
    for record in (here, figures.schedule_on_h200(system)):
        is_serial = record is not None and system is SERIAL
        cells += [_ms(record, "step_ms"), "1.00" if is_serial else _ratio(record, "speedup_vs_serial")]
    return [*cells, system.differs]


def _over_dense_rows(figures: Figures) -> list[list[str]]:
    assert NESTED.lookup_ms is not None
    both = figures.here("end_to_end", schedule="nested")
    one = figures.here("ranks", schedule="nested", ranks=1)
    one_over_dense = f"{float(one['step_ms']) / float(one['paced_ms']):.2f}" if one is not None else NOTHING
    h200 = _ratio(_find(figures.one_rank, schedule="nested", num_distinct=240_000), "step_over_dense_unsplit")
    return [
        ["lookup and exchange", f"{NESTED.step_ms / DENSE_MS:.2f}", _ratio(both, "step_over_dense"), NOTHING, NOTHING],
        ["lookup alone", f"{1 + NESTED.lookup_ms / DENSE_MS:.2f}", NOTHING, one_over_dense, h200],
    ]


def _shares_row(figures: Figures, system: System) -> list[str]:
    """Returns exposed lookup and exchange, relative to serial's."""
    here = figures.here("end_to_end", schedule=system.schedule, stale=system.stale)
    h200 = figures.schedule_on_h200(system)
    serial_on_h200 = figures.schedule_on_h200(SERIAL)
    published = {"lookup": (system.lookup_ms, SERIAL.lookup_ms), "exchange": (system.exchange_ms, SERIAL.exchange_ms)}
    cells = [_way(system)]
    for part in PARTS:
        mine, whole = published[part]
        cells.append(f"{mine / whole:.3f}" if mine is not None and whole is not None else NOTHING)
        cells.append(_ratio(here, f"exposed_{part}_fraction", 3))
        field = f"exposed_{part}_ms"
        if h200 is None or serial_on_h200 is None:
            cells.append(NOTHING)
        else:
            cells.append(f"{float(h200[field]) / float(serial_on_h200[field]):.3f}")
    return cells


def _split_row(record: Record) -> list[str]:
    is_split = int(record["num_micro_batches"]) > 1
    return [
        f"{record['micro_batch_size']:,}" + ("" if is_split else ", unsplit"),
        {"none": "given", "spectral": "clustered"}[str(record["method"])] if is_split else NOTHING,
        str(record["window"]) if is_split else NOTHING,
        _ratio(record, "exchanged_bytes_vs_unsplit", 3),
        _ratio(record, "published_exchange_vs_unsplit", 3),
        _ratio(record, "busy_exchange_vs_unsplit", 3),
        _ratio(record, "exposed_exchange_fraction", 3),
        _ratio(record, "speedup_vs_unsplit"),
    ]


def _robustness_rows(figures: Figures) -> list[list[str]]:
    here = [record for record in figures.measured if record["table"] == "robustness"]
    rows = [_robustness_row("base case", "", here, figures.robustness, BASE, 0)]
    ranges = {"dim": "512 to 1,024", "num_layers": "2 to 8", "length": "512 to 2,048"}
    for varied, name in SIZES.items():
        rows += [_robustness_row(name, ranges[varied], here, figures.robustness, varied, number) for number in range(2)]
    return rows


def _robustness_row(
    name: str, published: str, here: Sequence[Record], h200: Sequence[Record], varied: str, number: int
) -> list[str]:
    """Returns the row of the `number`-th case that varies a size."""
    cells = [name, published]
    for records, difference in ((here, "step_over_dense_unsplit_less_base"), (h200, "robustness_difference")):
        cases = [record for record in records if record["varied"] == varied]
        record = cases[number] if number < len(cases) else None
        cells += [_case(record, varied), _ratio(record, "step_over_dense_unsplit"), _ratio(record, difference, 3, "+")]
        if records is here:
            cells.append(_ratio(record, "speedup_vs_serial"))
    return cells


def _case(record: Record | None, varied: str) -> str:
    if record is None:
        return NOTHING
    if varied == BASE:
        return f"{record['dim']:,} / {record['num_layers']} / {record['length']:,}"
    return f"{record[varied]:,}"


def _ranks_row(figures: Figures, system: System) -> list[str]:
    same = {"schedule": system.schedule, "stale": system.stale}
    one, two, four = (figures.here("ranks", ranks=ranks, **same) for ranks in (1, 2, 4))
    steps = [_ms(record, "step_ms") for record in (one, two, four)]
    efficiencies = [_ratio(record, "scaling_efficiency") for record in (two, four)]
    return [_way(system), f"{system.efficiency:.2f}", *steps, *efficiencies]


def _way(system: System) -> str:
    return f"{system.schedule}, stale rows" if system.stale else system.schedule


def _ms(record: Record | None, field: str) -> str:
    return f"{float(record[field]):,.0f} ms" if record is not None else NOTHING


def _ratio(record: Record | None, field: str, decimals: int = 2, sign: str = "") -> str:
    return f"{float(record[field]):{sign}.{decimals}f}" if record is not None and field in record else NOTHING


def _values(record: Record | None) -> list[float]:
    return [float(record["speedup_vs_serial"])] if record is not None else []


def _find(records: Sequence[Record], **conditions: object) -> Record | None:
    for record in records:
        if all(record.get(name) == value for name, value in conditions.items()):
            return record
    return None


def _recorded(results: Path, bench: str) -> list[Record]:
    """Returns the records of a result, or none if it is not there."""
    path = results / f"{bench}.json"
    return list(json.loads(path.read_text())["records"]) if path.exists() else []


def _table(header: str, rows: Sequence[Sequence[str]]) -> str:
    columns = header.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)
