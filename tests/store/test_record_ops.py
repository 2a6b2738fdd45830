"""Copying records against torch's own indexing.

Fails if copy_records of csrc/src/copy.cpp swaps the two lists of places.
"""

import pytest
import torch

from nestpipe.store import copy_records


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("num_records", "num_columns"), [(0, 3), (1, 1), (50, 7), (20_000, 130)])
def test_like_indexing(dtype: torch.dtype, num_threads: int, num_records: int, num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_records)
    source = torch.randn(2 * num_records + 1, num_columns, generator=generator, dtype=dtype)
    target = torch.randn(3 * num_records + 1, num_columns, generator=generator, dtype=dtype)
    from_places = torch.randint(len(source), (num_records,), generator=generator)
    to_places = torch.randperm(len(target), generator=generator)[:num_records]
    expected = target.clone()
    expected[to_places] = source[from_places]
    copy_records(source, from_places, target, to_places, num_threads)
    assert torch.equal(target, expected)


def test_refusals() -> None:
    source, target = torch.zeros(4, 3), torch.zeros(4, 3)
    inside, outside = torch.tensor([0, 3]), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"from_places\[1\] is 4, outside of an array of 4"):
        copy_records(source, outside, target, inside)
    with pytest.raises(ValueError, match=r"to_places\[1\] is -1, outside"):
        copy_records(source, inside, target, torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="source must have shape"):
        copy_records(source, inside, torch.zeros(4, 2), inside)
    with pytest.raises(ValueError, match="places"):
        copy_records(source, inside, target, torch.tensor([0]))
    assert not target.any()
