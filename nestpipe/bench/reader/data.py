"""Writes the data that `bench reader` reads: prepared folders of clicks and histories, with rows of realistic size."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.files.manifest import Kind, Manifest, describe_file
from nestpipe.data.files.prepared import CLICK_FEATURES
from nestpipe.data.synthetic.clicks import NUM_DENSE, ClickData
from nestpipe.data.synthetic.draws import normal, stream, zipf_quantiles, zipf_values

MISSING_SHARE = 0.04
"""Share of missing keys in every third field, about that of Criteo Kaggle."""
NUM_USERS, NUM_ITEMS = 6040, 3706
"""Users and items of MovieLens-1M."""
FEWEST, MEDIAN, SPREAD, MOST = 20, 96, 1.05, 2314
"""Approximate distribution of the lengths of its histories: log-normal, clipped."""
USERS_A_GROUP = 2000


def write_clicks(folder: Path, num_groups: int, group_rows: int) -> None:
    """Writes the synthetic clicks in the form of prepared Criteo data: keys of 32 bits, some missing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data, path = ClickData(seed=1), folder / "train-00000.parquet"
    writer = None
    for group in range(num_groups):
        batch = data.samples(group * group_rows, group_rows)
        columns = {"label": batch.inputs["click"].numpy().astype(np.int64)}
        columns |= {f"dense_{i}": batch.inputs["dense"][:, i].numpy() for i in range(NUM_DENSE)}
        numbers = np.arange(group * group_rows, (group + 1) * group_rows)
        for field, (name, feature) in enumerate(zip(CLICK_FEATURES, ClickData.feature_names, strict=True)):
            is_missing = (stream(f"missing {field}", 0, numbers) >> 11) * 2.0**-53 < MISSING_SHARE * (field % 3 == 2)
            columns[name] = pa.array(batch.keys[feature].values.numpy() & 0xFFFFFFFF, mask=is_missing)
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    num_rows = num_groups * group_rows
    _write_manifest(folder, "clicks", "criteo-kaggle", path, "train", num_rows, {"rows": num_rows})


def write_histories(folder: Path, num_users: int = NUM_USERS) -> None:
    """Writes histories with the number of users and the lengths of MovieLens-1M."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    users = np.arange(num_users, dtype=np.uint64)
    lengths = np.clip((MEDIAN * np.exp(SPREAD * normal(stream("length", 1, users)))).astype(np.int64), FEWEST, MOST)
    offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    events: NDArray[np.uint64] = np.arange(offsets[-1], dtype=np.uint64)
    items = zipf_values(zipf_quantiles(NUM_ITEMS, 0.8), stream("item", 1, events)).astype(np.int64)
    times = (stream("gap", 1, events) % np.uint64(1000)).astype(np.int64).cumsum()
    lists = {"item": items, "time_seconds": times}
    columns = {name: pa.LargeListArray.from_arrays(offsets, pa.array(values)) for name, values in lists.items()}
    table = pa.table({"user": users.astype(np.int64)} | columns)
    path = folder / "users-00000.parquet"
    pq.write_table(table, path, row_group_size=USERS_A_GROUP)
    counts = {"users": num_users, "items": NUM_ITEMS, "events": int(offsets[-1])}
    _write_manifest(folder, "histories", "movielens-1m", path, "all", num_users, counts)


def _write_manifest(
    folder: Path, kind: Kind, source: str, path: Path, split: str, num_rows: int, counts: dict[str, int]
) -> None:
    files = [describe_file(path, split, num_rows)]
    Manifest(kind, source, {}, counts, files, {}, ["nestpipe", "bench", "reader"]).write(folder)
