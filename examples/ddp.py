"""Your own loop, whose dense gradients DistributedDataParallel sums instead of nestpipe's reducer.

torchrun --nproc-per-node 2 examples/ddp.py

With `step.commit`, all ranks agree that the step counts before the dense optimizer changes anything. If a loss or
gradient is not finite on one rank, all ranks raise, and no row has changed.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from own_model import Ranker, batches, features
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nestpipe


def sum_gradients(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums gradients over ranks. DDP would average them, but losses are divided by the weight of the global batch."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def in_parallel(model: nn.Module, world: nestpipe.World) -> nn.Module:
    if world.size == 1:
        return model
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, sum_gradients)
    return parallel


def train_step(model: nn.Module, step: nestpipe.pipelining.Step, optimizer: torch.optim.Optimizer) -> float:
    """Returns the loss of the global batch."""
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in step:
        is_summed = micro_batch.is_last or not isinstance(model, DistributedDataParallel)
        with nullcontext() if is_summed else model.no_sync():
            loss = model(micro_batch.embeddings, micro_batch.inputs) / step.weight
            loss.backward()
        total += loss.detach()
    step.commit(total)
    optimizer.step()
    optimizer.zero_grad()
    step.update_rows()
    return float(total)


def main(steps: int = 100) -> float:
    world = nestpipe.World.from_environment(device="cpu")
    torch.manual_seed(0)  # the same dense parameters on every rank
    model = in_parallel(Ranker(), world)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    total = 0.0
    with nestpipe.pipeline(features, batches(world.rank, steps), world=world, num_micro_batches=4) as pipeline:
        for step in pipeline:
            total = train_step(model, step, adam)
            if world.rank == 0 and step.number % 50 == 49:
                print(f"step {step.number + 1}: loss {total:.4f}")
    world.close()
    return total


if __name__ == "__main__":
    main()
