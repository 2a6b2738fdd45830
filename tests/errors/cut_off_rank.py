"""A rank that trains until it is cut off; see test_cut_off.py."""

import sys
from itertools import count

import torch

from nestpipe import World
from nestpipe.distributed import RankError
from tests.errors.test_cut_off import TIMEOUT_SECONDS
from tests.exactness.cases import Case, global_batches, make_trainer, share_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    world = World.from_environment(TIMEOUT_SECONDS)
    trainer = make_trainer(world, Case("adagrad", "pooled_sum", 2, steps=6, schedule="nested"))
    batches = share_of(global_batches(6), world)

    def tell(result) -> None:
        if len(result.losses) == 2:
            print("training", flush=True)

    try:
        trainer.fit((batches[i % 6] for i in count()), after_step=tell)
    except RankError as error:
        print(error, flush=True)
        sys.exit(1)
