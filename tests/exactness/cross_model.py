"""An executable model of the exchange across the batch boundary. It extends the model of the row pool, pool_model.py.

Several ranks train, each with a pool of its own. The rules, each in one sentence:

R2   A batch is in flight until its late update has run on the device: three batches are in flight.
R7   Three consecutive batches always fit; route makes room for them, and waits for nothing of the batch in training.
R8   A slot is noted as changed after its late update, with the step of its own batch.
X1   A row of batch t+1 is sent early if and only if its owner does not need its key for batch t.
X2   A gradient of batch t is returned late if and only if its owner does not need its key for batch t+1.
X3   Whether a step is finite is known in commit, of late gradients, too.
X4   Late gradients are summed in the order of ranks, as all others.
X5   Flush, stop and errors play what is late first, on every rank, and the next batch does not play it again.

A requester learns from a reply in route(t+1) which of its keys are early and late. If route(t+1) fails on any rank,
none are. A batch that is not a step has no keys: everything of its neighbours is early or late.

A record is the tuple of its updates: the step of each, and the micro-batches of every rank whose gradients were summed.
Ranks meet in collectives, one after another on each channel. A collective is over once all ranks have joined. Lanes
exchange in host memory, and block (as with gloo), or one thread issues the exchanges of all lanes to streams of the
device (as with NCCL).

cross_list.py has the list of operations, cross_rank.py the stages and the lanes of a rank, cross_trainer.py its compute
lane. cross_run.py plays runs and compares every record that is sent, and the stores after every flush, with plain
training. Each of CROSS_SWITCHES breaks one rule or leaves out one wait, to show that this is noticed.

Left out, besides what the model of the pool leaves out: prefetch and upload (parts of route here); sums of dense
gradients; lost ranks (if a retrieve fails on one rank, all ranks end before that batch); the other window (here a row
travels with the first micro-batch that needs it, its gradient with the last one).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.exactness.pool_model import SWITCHES, RowPool
from tests.exactness.pool_model_parts import Batch, Keys, Record
from tests.exactness.pool_model_time import Stream

CROSS_SWITCHES = {
    "late_slots_are_victims": ("R2: slots may be victims before their late update is launched", "wrong row"),
    "host_lane_skips_late_update": (
        "R2: neither write_back nor retrieve, by way of send_rows, waits until the late update has run",
        "wrong row",
    ),
    "capacity_of_two_batches": ("R7", "no slot"),
    "growth_when_drained": ("R7: route(t+1) waits for commit(t), to add slots while no lane works", "deadlock"),
    "early_row_of_overlap": ("X1", "wrong row"),
    "early_skips_late_update": ("X1: early rows of t+1 do not wait for late_update(t-1)", "wrong row"),
    "executor_forgets_marks": (
        "X1: a lane that waits for late_update(t-1) waits for the compute stream, if late_update was launched long ago",
        "wrong row",
    ),
    "early_skips_retrieve": ("X1: early rows of t+1 do not wait for retrieve(t+1)", "wrong row"),
    "failed_retrieve_skips_early": ("X1: a rank whose retrieve failed does not join the early exchange", "deadlock"),
    "route_error_is_own": ("X1, X2: a rank goes on if route failed on another one in the end", "wrong message"),
    "late_gradient_of_overlap": ("X2", "wrong row"),
    "return_skips_route": ("X2: gradients are returned before it is known which are late", "wrong message"),
    "late_update_of_next_step": ("X2: it has the number and learning rate of the step in training", "wrong row"),
    "late_update_ignores_mask": ("X2: it is not masked as its own step", "wrong row"),
    "late_update_skips_update": ("X2: late_update(t) does not wait for update(t), so reads no mask", "wrong row"),
    "flag_of_urgent_gradients": ("X3: the owner looks for numbers that are not finite, in what has come", "wrong row"),
    "late_sum_begins_with_own": ("X4", "wrong row"),
    "flush_skips_late": ("X5", "wrong store"),
    "late_played_twice": ("X5: what a flush has played is played again by the next batch", "wrong row"),
    "end_skips_late": ("X5: a fit that stops forgets what is late", "wrong store"),
    "outcomes_are_awaited_by_chance": (
        "X5: ranks end after a masked step before all of them know its outcome",
        "deadlock",
    ),
}
"""Ways to break a rule: the rule, and a failure that shows it."""


@dataclass
class CrossBatch(Batch):
    """A batch, as one rank knows it, which is an owner and a requester."""

    early_owned: set[int] = field(default_factory=set)
    """Owned keys whose rows are sent while the batch before trains."""
    late_owned: set[int] = field(default_factory=set)
    """Owned keys whose gradients are returned while the batch after trains."""
    early: set[int] = field(default_factory=set)
    """Needed keys whose rows are early, as their owners have said."""
    late: set[int] = field(default_factory=set)
    """Needed keys whose gradients are late, as their owners have said."""
    has_late: bool = False
    """True if gradients may be late. All ranks agree."""
    rows: dict[int, Record] = field(default_factory=dict)
    """Rows that have arrived, by needed key."""
    gradients: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """Gradients that have come back, by owned key and rank."""
    is_late_returned: bool = False
    is_late_updated: bool = False

    def slot_of(self, key: int) -> int:
        assert self.keys is not None
        return self.slots[self.keys.index(key)]


class CrossPool(RowPool):
    """The pool of a rank, with three batches in flight."""

    def breaks(self, switch: str) -> bool:
        assert switch in CROSS_SWITCHES or switch in SWITCHES
        return self.broken == switch

    def begin_fit(self, batches: Sequence[Keys], max_rows: int, compute: Stream, host: Stream) -> list[CrossBatch]:
        opened = [CrossBatch(batch.number, batch.keys) for batch in self.open(batches, max_rows, compute, host)]
        self._batches = list(opened)
        return opened

    def _in_flight(self, i: int) -> list[Batch]:
        """Returns the batch with late gradients, the one in training, and the one that is retrieved meanwhile."""
        return self._batches[max(i - 2, 0) : i + 1]

    def num_needed(self, i: int) -> int:
        if self.breaks("capacity_of_two_batches"):
            return len(self._keys(self._batches[max(i - 1, 0) : i + 1]))
        return super().num_needed(i)

    def _oldest_in_flight(self, i: int) -> int:
        if self.breaks("late_slots_are_victims"):
            return self._batches[max(i - 1, 0)].number
        return super()._oldest_in_flight(i)
