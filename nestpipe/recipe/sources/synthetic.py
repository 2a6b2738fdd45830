"""Synthetic clicks and histories. Samples from position HELD_OUT on are for evaluation; training never gets there."""

from dataclasses import asdict

from nestpipe.data.dataset import Dataset
from nestpipe.data.negatives import WithNegatives
from nestpipe.data.synthetic.clicks import NUM_DENSE, ClickData
from nestpipe.data.synthetic.histories import HistoryData, HistoryShape
from nestpipe.recipe.config import Config
from nestpipe.recipe.source import ClickSource, HeldOut, HistorySource
from nestpipe.registry import datasets

HELD_OUT = 2**40
NUM_WORKERS = 2
"""Processes that draw samples, if the model trains on an accelerator."""


@datasets.register("clicks")
class SyntheticClicks(ClickSource):
    """Synthetic click log with 13 dense inputs and Zipf-distributed keys."""

    num_dense = NUM_DENSE
    num_workers = NUM_WORKERS

    def training(self) -> Dataset:
        return self._dataset(self.config.data.num_samples)

    def held_out(self, num_samples: int) -> HeldOut:
        return HeldOut(self._dataset(HELD_OUT + num_samples), HELD_OUT)

    def feature_names(self) -> tuple[str, ...]:
        return ClickData.feature_names

    def _dataset(self, num_samples: int | None) -> Dataset:
        return ClickData(self.config.data.seed, num_samples, self.config.data.skew)


@datasets.register("histories")
class SyntheticHistories(HistorySource):
    """Synthetic histories of users with interests, sessions and items that lead to others."""

    has_known_items = False
    num_workers = NUM_WORKERS

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_items = config.histories.num_items

    def training(self) -> Dataset:
        return self._dataset(self.config.data.num_samples)

    def held_out(self, num_samples: int) -> HeldOut:
        return HeldOut(self._dataset(HELD_OUT + num_samples), HELD_OUT)

    def histories(self, num_samples: int | None) -> HistoryData:
        """Returns the histories without negatives."""
        shape = HistoryShape(**asdict(self.config.histories), max_length=self.config.model.max_length)
        return HistoryData(self.config.data.seed, num_samples, shape)

    def _dataset(self, num_samples: int | None) -> Dataset:
        data, model = self.histories(num_samples), self.config.model
        return WithNegatives(
            data, data.shape.num_items, model.num_negatives, model.negatives_per, self.config.data.seed
        )
