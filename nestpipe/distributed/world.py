"""The world: this rank, all ranks, and the exchanges between them. A world of one is an ordinary case."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class World:
    """One process among `size`. `World()` is a world of one, without a process group."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def from_environment(timeout_seconds: float = 25.0) -> "World":
        """The ranks that torchrun, or whoever set its variables, has started; a world of one if nobody has."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return World()
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
        return World(dist.get_rank(), dist.get_world_size())

    def all_to_all(self, parts: list[Tensor], receive_bytes: list[int]) -> list[Tensor]:
        """Sends parts[r], bytes, to rank r; returns what rank r sent here, receive_bytes[r] bytes of it."""
        if self.size == 1:
            return parts
        send = torch.cat(parts)
        received = torch.empty(sum(receive_bytes), dtype=torch.uint8)
        send_bytes = [part.numel() for part in parts]
        dist.all_to_all_single(received, send, receive_bytes, send_bytes)
        return list(received.split(receive_bytes))

    def all_to_all_equal(self, parts: Tensor) -> Tensor:
        """Sends row r to rank r; row r of the result is what rank r sent here."""
        if self.size == 1:
            return parts
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous())
        return received

    def all_reduce_sum(self, values: Tensor) -> None:
        """In place."""
        if self.size > 1:
            dist.all_reduce(values)

    def share_text(self, text: str, most_bytes: int = 4096) -> list[str]:
        """Every rank's text, on every rank."""
        data = text.encode()[:most_bytes]
        padded = torch.tensor(list(data.ljust(most_bytes, b"\0")), dtype=torch.uint8)
        rows = self.all_to_all_equal(padded.expand(self.size, most_bytes))
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
