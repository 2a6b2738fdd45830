"""The exchange of sums of gradients among the ranks that have the same rows."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from nestpipe.embedding.exchange import RowGradients
from nestpipe.embedding.exchange.codec import Codec
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.replica_sums import ReplicaSums

Exchanged = Callable[[Tensor, Callable[[], None]], AbstractContextManager[Tensor]]
"""(message, what to do meanwhile) -> the received message, valid within the context."""


def sum_over_replicas(
    plan: ReplicaSums, own: Mapping[int, Tensor], memory: Memory, codec: Codec, exchanged: Exchanged
) -> dict[int, RowGradients]:
    """Returns the sums over all sharding groups, by table group. own: those of this rank's sharding group.

    A rank's own sums pass the codec, too: all replicas add the same numbers in the same order, and stay equal.
    """
    message = memory.empty_message(plan.sums_out.num_bytes[0])
    sums = {
        g: memory.empty_rows(lists.num_sums, lists.group.dim, lists.group.dtype) for g, lists in plan.groups.items()
    }
    for g, lists in plan.groups.items():
        codec.write(memory, own[g], lists.sums_out.others(0), message, lists.sums_out.in_message(0))

    def meanwhile() -> None:
        for g, lists in plan.groups.items():
            codec.copy(memory, lists.group, own[g], lists.sums_out.own(0), sums[g], lists.sums_in.own(0))

    with exchanged(message, meanwhile) as received:
        for g, lists in plan.groups.items():
            codec.read(memory, received, lists.sums_in.in_message(0), sums[g], lists.sums_in.others(0))
    return {g: RowGradients(memory.sum_rows(sums[g], lists.by_key), lists.keys) for g, lists in plan.groups.items()}
