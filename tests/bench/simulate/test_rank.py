"""What `bench simulate` knows of its batches before anything runs."""

import pytest

from nestpipe.bench.network.loop import QUICK
from nestpipe.bench.network.overlap import QUICK_KEYS, Ring
from nestpipe.bench.simulate.rank import overlap_of


@pytest.mark.parametrize("num_micro_batches", [1, 8])
@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
def test_overlap_is_counted(overlap: float, num_micro_batches: int) -> None:
    """Fails if keys are compared with the other ranks' left out, or with the wrong neighbour."""
    if overlap == 1.0:  # a ring does not move on then, so the same batch comes again
        together = [[batch] * 3 for batch in (Ring(QUICK, QUICK_KEYS, 0.5, 2).batches(rank)[0] for rank in range(2))]
    else:
        together = [Ring(QUICK, QUICK_KEYS, overlap, 2).batches(rank) for rank in range(2)]
    shares = overlap_of(together, QUICK, num_micro_batches)
    assert shares["key_overlap"] == pytest.approx(overlap, abs=0.01)
    assert shares["head_overlap"] == pytest.approx(overlap, abs=0.1)
    assert shares["tail_overlap"] == pytest.approx(overlap, abs=0.1)
