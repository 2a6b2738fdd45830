"""Send-once: whatever the number of micro-batches, a batch sends the bytes of the unsplit one; resending sends more.

Fails, for example, if Plan.of brings a row with every micro-batch that uses it in window "once".
"""

from nestpipe import World, pipeline
from tests.exactness.cases import Case, features_of, global_batches, share_of
from tests.ranks import run_ranks


def bytes_of(world: World, num_micro_batches: int, window: str) -> tuple[int, int, int]:
    """Row and gradient bytes this rank sent to others in one step, and what its distinct keys of others need."""
    (batch,) = share_of(global_batches(1), world)
    features = features_of(Case("sgd", "pooled_sum"))
    options = {"world": world, "num_micro_batches": num_micro_batches, "window": window}
    with pipeline(features, [batch], **options) as steps:
        for step in steps:
            for micro_batch in step:
                sum(value.sum() for value in micro_batch.embeddings.values()).backward()
            step.update_rows()
            requests = step._route.request.tables
    needed = sum((sum(r.counts) - r.counts[world.rank]) * r.table.dim * 8 for r in requests)
    return step.row_bytes, step.gradient_bytes, needed


def test_bytes() -> None:
    whole = run_ranks(3, bytes_of, 1, "once")
    assert run_ranks(3, bytes_of, 8, "once") == whole
    assert [gradient for _, gradient, _ in whole] == [needed for _, _, needed in whole]
    assert sum(row for row, _, _ in whole) == sum(needed for _, _, needed in whole) > 0
    resent = run_ranks(3, bytes_of, 8, "resend")
    assert sum(row for row, _, _ in resent) > sum(row for row, _, _ in whole)
