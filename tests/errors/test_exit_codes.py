"""After another rank has failed, a user's own program ends with its traceback and code 1.

Fails if link._end_links does not call Link.end: a lane is then in a collective while the interpreter shuts down,
returns when the other rank's connections close, and aborts the process.
"""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, time
import torch
from nestpipe import World
from nestpipe.distributed import RankError
from tests.exactness.cases import Case, global_batches, make_trainer, share_of

class SlowToEnd:
    def __del__(self, sleep=time.sleep):
        sleep(3)  # during the shutdown of the interpreter, when threads can no longer return to it

torch.set_num_threads(1)
world = World.from_environment(timeout_seconds=10.0)
trainer = make_trainer(world, Case("adagrad", "pooled_sum", 2, steps=6, schedule="nested"))
forward = trainer.model.forward

def failing(embeddings, inputs):
    if trainer.num_steps == 2 and world.rank == 1:
        raise KeyError("no such layer")
    return forward(embeddings, inputs)

trainer.model.forward = failing
try:
    trainer.fit(share_of(global_batches(6), world))
except KeyError:
    time.sleep(3)  # its connections stay open until rank 0 is about to end
    os._exit(1)
except RankError:
    sys.slow = SlowToEnd()
    raise
"""


@pytest.mark.slow
def test_a_users_own_program() -> None:
    """In version 0.1 rank 0 ended with -6: terminate called without an active exception."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **address, "RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, text = ranks[0].communicate(timeout=50)
        assert "RankError: step 2, in" in text
        assert "rank 1 failed: KeyError: 'no such layer'" in text
        assert "terminate called" not in text
        assert ranks[0].returncode == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
