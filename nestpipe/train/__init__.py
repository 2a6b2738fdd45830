"""The Trainer, and what belongs to it: dense gradients, loss sums, checkpoints, the digest."""
