"""Your own model in your own loop: it predicts which of two genres a user will like next.

python examples/own_model.py                                 one process
torchrun --nproc-per-node 2 examples/own_model.py            two; every rank owns half of the rows
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nestpipe

item = nestpipe.Table("item", dim=16, optimizer=nestpipe.optim.Adagrad(lr=0.2))
user = nestpipe.Table("user", dim=16, optimizer=nestpipe.optim.SGD(lr=0.5), init=nestpipe.init.Uniform(-0.1, 0.1))
features = {"history": nestpipe.Sequence(item), "user": nestpipe.Pooled(user)}


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, embeddings: nestpipe.embedding.Embeddings, inputs: dict[str, Tensor]) -> Tensor:
        history = embeddings["history"].padded(8).mean(1)
        logit = self.out(torch.relu(self.hidden(torch.cat([history, embeddings["user"]], dim=1)))).squeeze(1)
        return F.binary_cross_entropy_with_logits(logit, inputs["likes"], reduction="sum")  # a sum, never a mean


def batches(rank: int, num_batches: int, size: int = 64):
    """Yields batches. Items below 500 are of the first genre, others of the second; users like what they saw most."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_batches):
        lengths = torch.randint(1, 9, (size,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        taste = torch.rand(size, generator=generator)
        second = torch.rand(int(offsets[-1]), generator=generator) < taste.repeat_interleave(lengths)
        keys = torch.randint(500, (len(second),), generator=generator) + 500 * second
        users = torch.randint(10**12, (size,), generator=generator)  # any int64 is a key; training creates its row
        history, likes = nestpipe.Jagged(keys, offsets), (taste > 0.5).float()
        yield nestpipe.Batch({"history": history, "user": nestpipe.Jagged.one_each(users)}, {"likes": likes})


def main(steps: int = 150) -> float:
    world = nestpipe.World.from_environment()
    torch.manual_seed(0)  # the same dense parameters on every rank
    model = Ranker().to(world.device)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    reducer = nestpipe.DenseReducer(model, world)
    with nestpipe.pipeline(features, batches(world.rank, steps), world=world, num_micro_batches=4) as pipeline:
        for step in pipeline:
            total = 0.0
            for micro_batch in step:
                loss = model(micro_batch.embeddings, micro_batch.inputs) / step.weight
                with reducer.overlap(micro_batch.is_last):
                    loss.backward()
                total += loss.item()
            reducer.finish(step)
            adam.step()
            adam.zero_grad()
            step.update_rows()
            if step.number % 50 == 49:
                print(f"rank {world.rank}, step {step.number + 1}: its share of the loss {total:.4f}")
    print(f"rank {world.rank} owns {pipeline.store.size('item')} item rows and {pipeline.store.size('user')} user rows")
    world.close()
    return total


if __name__ == "__main__":
    main()
