"""Reads the rows of a batch without training. No row is created or changed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.distributed import Channel, Notice
from nestpipe.embedding.batch_rows import BatchRows
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering
from nestpipe.embedding.dedup import BatchDedup, dedup_batch
from nestpipe.embedding.exchange import Exchange, make_exchange
from nestpipe.embedding.features import Embeddings
from nestpipe.embedding.group import FeatureGroups, group_features
from nestpipe.embedding.memory import memory_on
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.route import Route
from nestpipe.embedding.table import Feature
from nestpipe.store import Store

HOST = memory_on(torch.device("cpu"))


@dataclass(frozen=True)
class Part:
    """The model's arguments for one micro-batch."""

    embeddings: Embeddings
    inputs: Mapping[str, Tensor]
    num_samples: int


class Reading:
    """A batch whose rows have been retrieved, in host memory. Iterating yields its parts, on the model's device.

    A missing key has its initial row.
    """

    def __init__(
        self,
        features: FeatureGroups,
        route: Route,
        uploaded: BatchDedup,
        store: Store,
        exchange: Exchange,
        device: torch.device,
        is_counting: bool = True,
    ) -> None:
        """uploaded: the batch of the route on the model's device."""
        self.weights = route.batch.weights
        """Weights of this rank's batch."""
        self._features = features
        self._batch = uploaded
        self._device = device
        rows = BatchRows(store, HOST)
        resident = rows.retrieve(route.owner_dedups).groups
        self.num_untrained_keys = rows.num_unstored_keys if is_counting else 0
        """Distinct keys of the global batch that this rank owns and that were never trained. Of a replica group, one
        rank counts them."""
        self._exchange = exchange.open(route, exchange.plan(route, "once"), resident)

    def __iter__(self) -> Iterator[Part]:
        for i, num_samples in enumerate(self._batch.num_samples):
            self._exchange.send_rows(i)
            rows = [ModelRows(group.tensor.detach().to(self._device)) for group in self._exchange.rows(i)]
            if num_samples > 0:
                embeddings = Embeddings(self._features, self._batch.groups, i, rows)
                yield Part(embeddings, self._batch.inputs[i], num_samples)


def read_batch(
    features: Mapping[str, Feature],
    batch: Batch | Exception | None,
    store: Store,
    channel: Channel,
    num_parts: int = 1,
    clustering: Clustering = GIVEN_ORDER,
    device: torch.device | None = None,
) -> Reading | None:
    """Reads a batch; returns None if no rank has one. Call it on all ranks.

    An exception instead of a batch is raised on every rank.
    """
    groups, exchange = group_features(features, has_replicas=False), make_exchange(channel, channel, channel, HOST)
    memory = memory_on(device or HOST.device)
    keys: BatchDedup | Exception
    try:
        if isinstance(batch, Exception):
            raise batch
        split = num_parts, channel.mesh.num_shards, store.num_threads, clustering
        keys = uploaded = dedup_batch(groups, batch, *split)
        if not memory.is_host:
            uploaded = memory.upload_batch(memory.prepare_batch(groups, batch, *split))
    except Exception as error:
        keys = error
    route = exchange.route(keys, groups, Notice())
    if route is None:
        return None
    return Reading(groups, route, uploaded, store, exchange, memory.device, is_counting=channel.mesh.replica == 0)
