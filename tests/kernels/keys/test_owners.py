"""Tests owners found on a device against the native library and the oracle.

Fails, for example, if _shifted fills up with the sign (leaves out its mask), if owners_of takes the low bits of a hash,
or if it leaves out the salts.
"""

import pytest
import torch

from nestpipe.kernels.keys.owners import owners_of
from nestpipe.store import group_by_owner
from nestpipe.store.native.plan_ops import table_salts
from tests.store.native.key_batches import owner

EXTREMES = [-(2**63), -(2**63) + 1, 2**63 - 1, 2**62, -(2**62), -1, 0, 1, 2**31, -(2**31), 2**32 - 1]
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 1536])


@WORLD_SIZES
def test_as_the_oracle(world_size: int, device: torch.device) -> None:
    """Each key has the salt of its own table."""
    names = ["a", "größe", "item"]
    generator = torch.Generator().manual_seed(world_size)
    drawn = torch.randint(-(2**63), 2**63 - 1, (60,), generator=generator)
    keys = torch.cat([torch.tensor(EXTREMES), drawn, torch.arange(19)])
    tables = torch.arange(len(keys)) % 3
    owners = owners_of(keys.to(device), table_salts(names)[tables].to(device), world_size)
    assert owners.dtype == torch.int32
    pairs = zip(keys.tolist(), tables.tolist(), strict=True)
    assert owners.tolist() == [owner(key, names[table], world_size) for key, table in pairs]


@WORLD_SIZES
def test_as_the_native_library(world_size: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(world_size)
    keys = torch.cat([torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=generator), torch.arange(-5000, 5000)])
    order, counts = group_by_owner("item", keys, world_size)
    expected = torch.empty(len(keys), dtype=torch.int32)
    expected[order] = torch.arange(world_size, dtype=torch.int32).repeat_interleave(counts)
    salts = table_salts(["item"]).expand(len(keys))
    assert torch.equal(owners_of(keys.to(device), salts.to(device), world_size).cpu(), expected)


def test_no_keys(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert owners_of(none, none, 3).tolist() == []
