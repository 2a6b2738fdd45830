"""The backend of collectives of device memory: NCCL if each rank has its own device; if ranks share a device, gloo,
through host memory."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

BACKENDS = ("auto", "gloo", "nccl")


def device_place(device: torch.device) -> str:
    """Returns a text that identifies a device among those of all hosts; empty if NCCL cannot use it."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def take_ranks_for_hosts(rank: int) -> None:
    """Makes NCCL, which this process has not used yet, take each rank for a host of its own. Then ranks may share a
    device, and exchange through loopback sockets. For tests on one device."""
    switched_off = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1")
    os.environ.update(switched_off, NCCL_HOSTID=f"nestpipe-{rank}", NCCL_SOCKET_IFNAME="lo")


def choose_backend(wanted: str, places: Sequence[str], *, may_share_device: bool = False) -> str:
    """Returns the backend for ranks on these devices. All ranks pass the same places, so all choose or refuse alike.

    may_share_device: NCCL takes each rank for a host of its own.
    """
    if wanted not in BACKENDS:
        raise ValueError(f"distributed.backend is {wanted!r}, must be one of {', '.join(map(repr, BACKENDS))}")
    if wanted == "gloo":
        return "gloo"
    without = [rank for rank, place in enumerate(places) if not place]
    sharing = [rank for rank, place in enumerate(places) if place and Counter(places)[place] > 1]
    if wanted == "auto":
        return "gloo" if without or sharing or len(places) == 1 else "nccl"
    if without:
        raise ValueError(
            f"distributed.backend = 'nccl' needs a CUDA device, and NCCL in torch, on every rank; {_ranks(without)} "
            "without. Set it to 'auto', or runtime.device to 'cuda'"
        )
    if sharing and not may_share_device:
        raise ValueError(
            f"distributed.backend = 'nccl' needs a device for each rank; {_ranks(sharing)} not alone on theirs. Start "
            "as many ranks as there are devices, or set it to 'auto' or 'gloo': ranks that share a device exchange "
            "through host memory"
        )
    return "nccl"


def abort_all(groups: Sequence[dist.ProcessGroup]) -> None:
    """Aborts the communicators of groups together: one after another, they could wait for each other."""
    nccl: Any = groups[0]._get_backend(torch.device("cuda"))
    nccl._group_start()
    try:
        for group in groups:
            group.abort()
    finally:
        nccl._group_end()


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks))
    return f"rank {named} is" if len(ranks) == 1 else f"ranks {named} are"
