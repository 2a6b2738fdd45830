"""Clicks as they come, in time order: numbers squashed, categories as keys, the last part held out."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from nestpipe.datasets.click_files import ClickFiles, split_spool
from nestpipe.datasets.engine import EngineError, Report
from nestpipe.datasets.text_files import estimate_lines
from nestpipe.datasets.work import Prepared, Stages, Work, no_good_line, scan_report

NUM_DENSE, NUM_SPARSE = 13, 26
SHARES = {"reading": 0.95, "splitting": 0.05}
SCHEMA = pa.schema(
    [
        pa.field("label", pa.int64(), nullable=False),
        *(pa.field(f"dense_{number}", pa.float32(), nullable=False) for number in range(NUM_DENSE)),
        *(pa.field(f"key_{number}", pa.int64()) for number in range(NUM_SPARSE)),
    ]
)


def prepare_clicks(work: Work, held_out_share: int | None) -> Prepared:
    """The last 1 / held_out_share of the rows is held out, or, without it, the last file; half for validation, half for
    the test."""
    stages = Stages(work.progress, SHARES)
    report = stages.begin("reading")
    num_bad, num_before_last = 0, 0
    with ClickFiles(work.folder, "spool", SCHEMA) as spool:
        for number, file in enumerate(work.source.files):
            num_before_last = spool.num_rows
            with work.reading(file):
                num_bad += _read(work, file, spool, scan_report(work.source, number, report))
            if spool.num_rows == num_before_last:
                raise no_good_line(file)
    num_bad += work.num_rejected()
    num_rows = spool.num_rows
    num_train = num_before_last if held_out_share is None else num_rows - num_rows // held_out_share
    num_validation = (num_rows - num_train + 1) // 2
    splits = {"train": num_train, "validation": num_validation, "test": num_rows - num_train - num_validation}
    if 0 in splits.values():
        raise ValueError(f"{work.source.files[-1]}: too few good lines to hold some out; splits would be {splits}")
    files = split_spool(work.folder, SCHEMA, spool.files, splits, stages.begin("splitting"))
    return Prepared("clicks", SCHEMA, {"rows": num_rows, **splits, "bad_lines": num_bad}, files)


def _read(work: Work, file: Path, spool: ClickFiles, report: Report) -> int:
    """Gives the number of bad lines that were left out."""
    num_bad, num_read, num_lines = 0, 0, estimate_lines(file)
    try:
        for batch in work.engine.batches(_selected(work, file)):
            num_read += len(batch)
            report(min(1.0, num_read / num_lines))
            good = batch.column("good")
            num_bad_here = len(batch) - int(pc.sum(good).as_py() or 0)
            if num_bad_here and not work.skip_bad:
                raise work.bad_line(file)
            num_bad += num_bad_here
            spool.write(batch.filter(good) if num_bad_here else batch)
    except EngineError as error:
        raise work.failed_scan(file, error) from None
    return num_bad


def _selected(work: Work, file: Path) -> str:
    dense = ", ".join(
        f"CAST(ln(1 + CAST(greatest(coalesce(dense_{number}, 0), 0) AS DOUBLE)) AS FLOAT) AS dense_{number}"
        for number in range(NUM_DENSE)
    )
    keys = ", ".join(f"key_{number}" for number in range(NUM_SPARSE))
    lines = work.source.text_format.lines(file, skip_bad=work.skip_bad)
    return f"SELECT label, {dense}, {keys}, good FROM ({lines})"
