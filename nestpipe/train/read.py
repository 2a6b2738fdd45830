"""Rows for a batch that is read, not trained: nothing is created, nothing changes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.data.cluster import GIVEN_ORDER, Clustering
from nestpipe.distributed import Channel
from nestpipe.embedding.buffer import retrieve_rows
from nestpipe.embedding.embeddings import Embeddings, on_device
from nestpipe.embedding.request import make_request
from nestpipe.embedding.route import Route, route_keys
from nestpipe.embedding.table import Feature, tables_of
from nestpipe.embedding.window import open_window
from nestpipe.store import HostStore


@dataclass(frozen=True)
class Part:
    """What the model sees of one micro-batch."""

    embeddings: Embeddings
    inputs: Mapping[str, Tensor]
    num_samples: int


class Reading:
    """A batch routed and its rows retrieved, on one channel, in host memory; what the model is given then goes to its
    device. A missing key has its initial row."""

    def __init__(
        self, features: Mapping[str, Feature], route: Route, store: HostStore, channel: Channel, device: torch.device
    ) -> None:
        self.weights = route.request.weights
        """of this rank's batch"""
        self._features = features
        self._request = on_device(features, route.request, device)
        self._device = device
        buffers = retrieve_rows(route, store)
        self.num_untrained_keys = sum(len(buffer.found) - int(buffer.found.sum()) for buffer in buffers)
        """distinct keys of the global batch that this rank owns and never trained"""
        self._window = open_window(route, buffers, channel, channel)

    def __iter__(self) -> Iterator[Part]:
        for i, num_samples in enumerate(self._request.num_samples):
            self._window.bring(i)
            if num_samples > 0:
                leaves = {name: leaf.detach().to(self._device) for name, leaf in self._window.leaves(i).items()}
                yield Part(
                    Embeddings(self._features, self._request.placed[i], leaves), self._request.inputs[i], num_samples
                )


def read_batch(
    features: Mapping[str, Feature],
    batch: Batch | Exception | None,
    store: HostStore,
    channel: Channel,
    num_parts: int = 1,
    clustering: Clustering = GIVEN_ORDER,
    device: torch.device | None = None,
) -> Reading | None:
    """All ranks call it; None when no rank has a batch. An exception instead of a batch is raised on every rank."""
    try:
        if isinstance(batch, Exception):
            raise batch
        request = make_request(features, batch, num_parts, channel.size, store.num_threads, clustering)
    except Exception as error:
        route = route_keys(error, len(tables_of(features)), channel)
    else:
        route = route_keys(request, len(tables_of(features)), channel)
    return None if route is None else Reading(features, route, store, channel, device or torch.device("cpu"))
