"""The mesh of ranks: sharding groups, each with all rows, and replica groups, whose ranks have the same rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """The ranks in `replicas` rows of equal length. Each row, of consecutive ranks, is a sharding group, in which all
    rows of all tables are sharded. Each column is a replica group: its ranks have the same shard."""

    rank: int
    size: int
    num_replicas: int = 1
    """Number of sharding groups; with one, no row has a replica."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.size % self.num_replicas != 0:
            divisors = ", ".join(str(n) for n in range(1, self.size + 1) if self.size % n == 0)
            raise ValueError(
                f"exchange.replicas = {self.num_replicas} does not divide the {self.size} ranks into groups of equal "
                f"size; set it to one of {divisors}"
            )

    @property
    def num_shards(self) -> int:
        """Returns the number of ranks of a sharding group."""
        return self.size // self.num_replicas

    @property
    def shard(self) -> int:
        """Returns the number of this rank in its sharding group."""
        return self.rank % self.num_shards

    @property
    def replica(self) -> int:
        """Returns the number of this rank's sharding group."""
        return self.rank // self.num_shards

    @property
    def sharding_group(self) -> range:
        """Returns the ranks that have all rows together with this one, in order of their shards."""
        return range(self.replica * self.num_shards, (self.replica + 1) * self.num_shards)

    @property
    def replica_group(self) -> range:
        """Returns the ranks that have the same rows as this one."""
        return range(self.shard, self.size, self.num_shards)

    @property
    def part(self) -> int:
        """Returns a number of this rank, so that the keys of owner `part` among `size` owners are on this rank: work on
        each key once, shared among all ranks."""
        return self.shard * self.num_replicas + self.replica
