"""The named moments at which a fault can hit a rank: calls of functions of the package, or of the file system."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """The calls of one function in the process of a rank."""

    name: str
    target: str
    """Module and name of the function, as in "nestpipe.pipelining.stages:Stages.update"."""
    in_folder: bool = False
    """Whether only calls count whose first argument is a path, or an open file, in the folder of checkpoints."""
    only_rank: int | None = None
    """The only rank that calls it; None if all ranks do."""
    is_rare: bool = False
    """Whether it depends on the speed of the machine, or on the schedule, that it is reached at all."""


def _methods(target: str, names: tuple[str, ...]) -> tuple[Moment, ...]:
    return tuple(Moment(name, f"{target}.{name}") for name in names)


CROSSING = tuple(
    Moment(name, f"nestpipe.pipelining.stages:Stages.{name}", is_rare=True)
    for name in ("send_early_rows", "return_late_gradients", "late_update")
)
"""Stages that only nested has, with several ranks."""
STAGE_MOMENTS = (
    *CROSSING,
    *_methods("nestpipe.pipelining.stages:Stages", ("prefetch", "upload", "route", "retrieve", "begin", "send_rows")),
    Moment("dense", "nestpipe.bench.faults.clicks:NoisyDLRM.predict"),
    *_methods("nestpipe.pipelining.stages:Stages", ("return_gradients",)),
    Moment("reduce", "nestpipe.train.reducer:DenseReducer.finish"),
    Moment("commit", "nestpipe.pipelining.step:Step.begin_commit"),
    *_methods("nestpipe.pipelining.stages:Stages", ("sum_gradients", "update", "write_back", "flush", "end")),
)
SAVE_MOMENTS = (
    Moment("collect", "nestpipe.checkpoint.save:Save._collect"),
    Moment("make the folder", "nestpipe.checkpoint.save:Save._begin", only_rank=0),
    Moment("begin the rows", "nestpipe.checkpoint.save:Save._begin_rows"),
    Moment("keep aside", "nestpipe.checkpoint.row_writer:RowWriter._keep_aside", is_rare=True),
    Moment("append what is aside", "nestpipe.checkpoint.row_writer:RowWriter._append_aside"),
    Moment("append to a shard", "nestpipe.checkpoint.shards:ShardFile._append"),
    Moment("finish a shard", "nestpipe.checkpoint.shards:ShardFile.finish"),
    Moment("write a state", "nestpipe.checkpoint.save:write_state"),
    Moment("sync a file", "os:fsync", in_folder=True),
    Moment("write to a file", "os:writev", in_folder=True),
    Moment("replace a small file", "os:replace", in_folder=True),
    Moment("write a small file", "nestpipe.checkpoint.folder:write_synced"),
    Moment("finish", "nestpipe.checkpoint.save:Save.finish"),
    Moment("publish", "nestpipe.checkpoint.folder:publish", only_rank=0),
    Moment("rename", "os:rename", in_folder=True, only_rank=0),
)
REMOVAL_MOMENTS = (
    Moment("remove older", "nestpipe.checkpoint.folder:remove_older", only_rank=0),
    Moment("remove one", "nestpipe.checkpoint.folder:_remove", only_rank=0),
    Moment("remove files", "nestpipe.checkpoint.folder:_remove_our_files", only_rank=0),
    Moment("remove a file", "os:unlink", in_folder=True, only_rank=0),
    Moment("remove a folder", "os:rmdir", in_folder=True, only_rank=0),
)
LOAD_MOMENTS = (
    Moment("open the folders", "nestpipe.recipe.run:open_folders"),
    Moment("list checkpoints", "nestpipe.checkpoint.folder:candidates"),
    Moment("read a checkpoint", "nestpipe.checkpoint.load:_read"),
    Moment("read a part", "nestpipe.checkpoint.load:read_part"),
    Moment("read a block", "nestpipe.checkpoint.shards:ShardReader._read_block"),
    Moment("import a block", "nestpipe.checkpoint.row_reader:RowReader._take"),
    Moment("read a state", "nestpipe.checkpoint.load:read_state"),
    Moment("set the dense part", "nestpipe.checkpoint.load:_set_dense"),
    Moment("set the random state", "nestpipe.checkpoint.load:load_random_state"),
    Moment("load", "nestpipe.train.trainer:Trainer.load"),
)
STEP = Moment("step", "nestpipe.train.trainer:Trainer._record_progress")
"""The end of a step. A last call follows at the end of the training."""

MOMENTS = {moment.name: moment for moment in (*STAGE_MOMENTS, *SAVE_MOMENTS, *REMOVAL_MOMENTS, *LOAD_MOMENTS, STEP)}


@dataclass(frozen=True)
class Hit:
    """A fault that a rank does to itself at a moment."""

    moment: str
    number: int
    """Which call it is, from 1."""
    is_after: bool = False
    """Whether it hits after the call, not before it."""
    action: str = "kill"
    """kill, terminate (SIGTERM), one of disk.TROUBLES, or mend (the disk)."""
    leave_bytes: int = 0
    """Bytes that are left on a full disk."""

    def __str__(self) -> str:
        return f"{self.action} {'after' if self.is_after else 'before'} call {self.number} of {self.moment!r}"
