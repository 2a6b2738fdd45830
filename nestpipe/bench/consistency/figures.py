"""Plot and table of `bench consistency`: the differences from serial."""

from collections.abc import Sequence

from nestpipe.bench.harness.plot import Series, strip_plot
from nestpipe.bench.harness.report import Record

METRICS = {"hr_10": "HR@10", "hr_50": "HR@50", "ndcg_10": "NDCG@10", "ndcg_50": "NDCG@50"}


def plot(records: Sequence[Record]) -> str:
    """Draws an SVG with a mark for every metric of every run except serial's."""
    compared: dict[str, list[Record]] = {}
    for record in records:
        if record["schedule"] != "serial":
            compared.setdefault(_name(record), []).append(record)
    if not compared:
        raise ValueError(
            "the result has no run to compare with serial; run `nestpipe bench consistency` without --quick"
        )
    series = [
        Series(f"{name}, {_seeds(runs)}", [[_difference(run, metric, records) for run in runs] for metric in METRICS])
        for name, runs in compared.items()
    ]
    ranks, steps = records[0]["ranks"], records[0]["steps"]
    title = f"HSTU, {ranks} ranks, {steps} steps: metrics of held-out users against serial"
    return strip_plot(title, "difference from serial, in 1e-3", list(METRICS.values()), series)


def table(records: Sequence[Record]) -> str:
    """Returns a table in Markdown: the metrics of each run, and in parentheses their differences from serial's in 1e-3.

    Serial is that of the same seed. A difference of 0 is exactly 0.
    """
    head = ["seed", "schedule", *METRICS.values(), "final loss", "digest"]
    lines = [head, ["---"] * len(head), *(_row(record, records) for record in records)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    metrics = [f"{record[metric]:.5f}{_in_parentheses(record, metric, records)}" for metric in METRICS]
    return [str(record["seed"]), _name(record), *metrics, f"{record['final_loss']:.5f}", str(record["digest"])[:8]]


def _in_parentheses(record: Record, metric: str, records: Sequence[Record]) -> str:
    if record["schedule"] == "serial":
        return ""
    difference = _difference(record, metric, records)
    return f" ({difference:+.2f})" if difference else " (0)"


def _name(record: Record) -> str:
    return f"{record['schedule']}, stale rows" if record["stale"] else str(record["schedule"])


def _seeds(runs: Sequence[Record]) -> str:
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return f"seed {seeds}" if len(runs) == 1 else f"seeds {seeds} from left to right"


def _difference(record: Record, metric: str, records: Sequence[Record]) -> float:
    """Returns the difference from serial of the same seed, in 1e-3."""
    for other in records:
        if other["seed"] == record["seed"] and other["schedule"] == "serial":
            return (float(record[metric]) - float(other[metric])) * 1e3
    raise ValueError(f"there is no record of serial with seed {record['seed']} to compare with: run the whole bench")
