"""Bytes that a batch sends to other ranks, recomputed from the same batches.

Window "once" sends the bytes of the unsplit batch, whatever the number of micro-batches. Fails if plan._lists lists a
row in "all" micro-batches that use it. Window "resend" sends the distinct keys of other ranks for each micro-batch.
Fails if plan._lists lists a row only in the "first" of them.
"""

from dataclasses import replace

import pytest

from nestpipe import Batch, World
from nestpipe.embedding.cluster import Clustering
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.group import group_features
from nestpipe.store import group_by_owner, unique
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, share_of
from tests.ranks import run_ranks
from tests.schedules import OUTER

STEPS = 3
CASE = Case("sgd", "pooled_sum", steps=STEPS)


def foreign_bytes(world: World, case: Case, parts: list[Batch]) -> int:
    """Returns the bytes of the rows of each part's distinct keys that other ranks own."""
    total = 0
    for part in parts:
        for name, feature in features_of(case).items():
            keys = part.keys[name].values
            distinct, _ = unique(keys[keys != -7] if name == "tags" else keys)
            _, counts = group_by_owner(feature.table.name, distinct, world.size)
            foreign = len(distinct) - int(counts[world.rank])
            total += foreign * feature.table.dim * feature.table.dtype.itemsize
    return total


def parts_of(world: World, batch: Batch, case: Case) -> list[Batch]:
    """Returns the micro-batches that dedup_batch makes, by numbering the samples in an input."""
    numbered = Batch(batch.keys, {"label": batch.inputs["label"].new_tensor(range(len(batch)))})
    clustering = Clustering(case.method)
    features = group_features(features_of(case))
    deduped = dedup_batch(features, numbered, case.num_micro_batches, world.size, 1, clustering)
    return [batch[inputs["label"].long()] for inputs in deduped.inputs]


def bytes_of(world: World, case: Case) -> tuple[int, int, int, int]:
    """Returns the row and gradient bytes that this rank sent, and those of the keys it needs, unsplit and split."""
    batches = share_of(global_batches(STEPS), world)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    row_bytes = gradient_bytes = 0
    with make_pipeline(world, case, batches) as pipeline:
        for step in pipeline:
            for micro_batch in step:
                (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
            step.update_rows()
            row_bytes += step.row_bytes
            gradient_bytes += step.gradient_bytes
    whole = sum(foreign_bytes(world, case, [batch]) for batch in batches)
    apart = sum(foreign_bytes(world, case, parts_of(world, batch, case)) for batch in batches)
    return row_bytes, gradient_bytes, whole, apart


@pytest.mark.parametrize("schedule", OUTER)
def test_send_once_sends_what_the_unsplit_batch_sends(schedule: str) -> None:
    unsplit = run_ranks(3, bytes_of, CASE)
    split = run_ranks(3, bytes_of, replace(CASE, num_micro_batches=8, schedule=schedule))
    assert [(rows, gradients) for rows, gradients, *_ in split] == [
        (rows, gradients) for rows, gradients, *_ in unsplit
    ]
    assert [gradients for _, gradients, *_ in split] == [whole for _, _, whole, _ in split]  # a requester's own
    assert sum(rows for rows, *_ in split) == sum(whole for _, _, whole, _ in split) > 0


@pytest.mark.parametrize("method", ["spectral", "minhash", "none"])
@pytest.mark.parametrize("schedule", ["nested", pytest.param("intra", marks=pytest.mark.slow)])
def test_resend_sends_every_micro_batch(schedule: str, method: str) -> None:
    resent = run_ranks(
        3, bytes_of, replace(CASE, num_micro_batches=8, window="resend", schedule=schedule, method=method)
    )
    assert [gradients for _, gradients, *_ in resent] == [apart for *_, apart in resent]
    assert sum(rows for rows, *_ in resent) == sum(apart for *_, apart in resent)
    assert sum(apart for *_, apart in resent) > sum(whole for _, _, whole, _ in resent)
