"""Scores with a saved model, in one process, whatever the number of ranks that trained it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from nestpipe.checkpoint import read_whole
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.embedding.read import read_batch
from nestpipe.embedding.table import Feature, make_store, tables_of


class Scorer:
    """Scores with a model and all rows of a checkpoint. A key that was never trained has its initial row."""

    def __init__(
        self, model: nn.Module, features: Mapping[str, Feature], path: str | Path, num_threads: int = 1
    ) -> None:
        if not hasattr(model, "predict"):
            raise ValueError(f"{type(model).__name__} has no method predict(embeddings, inputs), which a Scorer calls")
        self.model = model
        self.features = dict(features)
        tables = tables_of(features)
        self.store, dense = read_whole(tables, Path(path), lambda seed: make_store(tables, seed, num_threads))
        self.model.load_state_dict(dense["model"])
        self.model.eval()
        self._channel = World().evaluate

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Returns the result of the model's `predict` for this batch."""
        device = next((parameter.device for parameter in self.model.parameters()), None)
        reading = read_batch(self.features, batch, self.store, self._channel, device=device)
        assert reading is not None
        parts = [self.model.predict(part.embeddings, part.inputs) for part in reading]  # type: ignore[operator]
        return torch.cat(parts) if parts else torch.empty(0)
