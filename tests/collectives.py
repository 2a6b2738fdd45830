"""Records the collectives of host memory that a rank begins."""

from collections.abc import Callable

from nestpipe import World
from nestpipe.distributed import Channel


class RecordingTransport:
    """Calls back before each collective of another transport."""

    def __init__(self, channel: Channel, record: Callable[[str, str], None]) -> None:
        self._name, self._record = channel.name, record
        self._transport = channel.transport
        self.blocks = channel.transport.blocks

    def begin_all_to_all(self, *arguments):
        self._record(self._name, "all_to_all")
        return self._transport.begin_all_to_all(*arguments)

    def begin_sum(self, *arguments):
        self._record(self._name, "sum")
        return self._transport.begin_sum(*arguments)


def record_collectives(world: World, record: Callable[[str, str], None]) -> None:
    """Calls record(channel, kind) before each collective of host memory, from now on."""
    for channel in (world.route, world.rows, world.gradients, world.dense, world.commit, world.control):
        if channel.transport is not None:
            channel.transport = RecordingTransport(channel, record)
