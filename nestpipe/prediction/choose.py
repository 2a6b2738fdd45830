"""Chooses the number of micro-batches of a run, before its first step."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import BatchSource
from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.prediction.measure import measure
from nestpipe.prediction.split_costs import SplitCosts, play_split, predict_step_ms
from nestpipe.prediction.words import shortage
from nestpipe.train.check_split import SplitCheck, SplitError
from nestpipe.train.trainer import Trainer

CANDIDATES = (1, 2, 4, 8, 16)
MARGIN = 0.01
"""The smallest number is taken whose predicted step is at most this much longer than the shortest."""


@dataclass(frozen=True)
class Choice:
    """A number of micro-batches, and why it was chosen. The same on all ranks."""

    num_micro_batches: int
    why: str
    predicted_step_ms: Mapping[int, float]
    """Without the dense optimizer, by number of micro-batches; empty if there was nothing to choose."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Choice":
        """Raises ValueError, KeyError or TypeError for a text that `to_json` has not written."""
        fields: dict[str, Any] = json.loads(text)
        steps = {int(num): float(step_ms) for num, step_ms in fields["predicted_step_ms"].items()}
        num = fields["num_micro_batches"]
        if type(num) is not int or num < 1:
            raise ValueError(f"num_micro_batches is {num!r}")
        return Choice(num, str(fields["why"]), steps)


def choose_num_micro_batches(trainer: Trainer, batches: Iterable[Batch]) -> Choice:
    """Chooses a number of micro-batches for the trainer, from trial steps on the first batch. All ranks call it,
    between two calls of fit. Batches that it reads are given back to their source."""
    world, options = trainer.world, trainer.options
    if world.size == 1:
        return Choice(1, "one rank exchanges nothing, so splitting a batch would only add work", {})
    if options.schedule not in WINDOWED:
        return Choice(
            1, f"schedule {options.schedule} exchanges nothing while it computes, so splitting hides nothing", {}
        )
    source = trainer.source_of(batches)
    trainer.choose_places(source)
    first = _first_batches(source)
    least = _least(trainer, len(first[0]) if first[0] is not None else 0)
    if least < 2:
        return Choice(1, "a rank has fewer than 2 samples in its first batch, or cannot read it", {})
    if objection := _objection(trainer, first[0]):
        return Choice(1, f"this model cannot be trained in several micro-batches: {objection}", {})
    candidates = [num for num in CANDIDATES if num <= least]
    costs = measure(trainer, first, least, candidates)
    if costs is None:
        return Choice(1, "the first batch has weight 0, so that it cannot be measured", {})
    # Hosts may round differently, so all ranks take the choice of rank 0.
    return Choice.from_json(world.control.share_text(choice_by(costs, candidates).to_json())[0])


def choice_by(costs: SplitCosts, candidates: Sequence[int]) -> Choice:
    """Returns the smallest number whose predicted step is nearly the shortest."""
    steps = {num: predict_step_ms(costs, num) for num in candidates}
    chosen = min(num for num in candidates if steps[num] <= (1 + MARGIN) * min(steps.values()))
    dense_ms, exchange_ms = float(np.mean(costs.dense_ms(1))), costs.exchange_ms(1)
    largest = max(candidates)
    added = [(costs.exchange_ms(largest) - exchange_ms), float(np.mean(costs.dense_ms(largest))) - dense_ms]
    why = (
        f"unsplit, a batch has {dense_ms:.1f} ms of dense compute and {exchange_ms:.1f} ms of exchange; each further "
        f"micro-batch adds {sum(added) / (largest - 1):.2f} ms"
    )
    result = play_split(costs, chosen)
    short = shortage(dense_ms, exchange_ms, result.parts["exposed_exchange_ms"], result.step_ms)
    return Choice(chosen, f"{why}. {short}" if short else why, steps)


def _first_batches(source: BatchSource) -> list[Batch | None]:
    """Returns the first two batches of this rank, the first one twice if there is no second; None for what cannot be
    read. Gives them back to their source, where an error is raised in its turn."""
    pulled: list[Batch | Exception] = []
    try:
        for batch in islice(source, 2):
            pulled.append(batch)
    except Exception as error:  # of the reader
        pulled.append(error)
    source.give_back(pulled)
    read = [item if isinstance(item, Batch) else None for item in pulled] or [None]
    return [read[0], read[-1]]


def _least(trainer: Trainer, number: int) -> int:
    by_rank = trainer.world.control.all_to_all_equal(torch.full((trainer.world.size, 1), number))
    return int(by_rank.min())


def _objection(trainer: Trainer, batch: Batch | None) -> str:
    """Returns why a model cannot be split, on any rank; empty if it can."""
    text = ""
    if trainer.check_split and batch is not None:
        check = SplitCheck(trainer.model, trainer.features, trainer.store, 2, trainer.options.clustering, warns=False)
        try:
            check.check(batch)
        except SplitError as error:
            text = str(error)
    return next(filter(None, trainer.world.control.share_text(text)), "")
