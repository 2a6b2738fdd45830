"""Checkpoints for tests of the tools: saved by a program, or written file by file as any number of ranks would."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe import Table, World, init, optim
from nestpipe.checkpoint import SaveOptions, Saver, Subject
from nestpipe.checkpoint.folder import MARKER
from nestpipe.checkpoint.manifest import FORMAT, MANIFEST, part_name, sealed, state_name
from nestpipe.checkpoint.match import describe_tables
from nestpipe.checkpoint.row_writer import buckets_of
from nestpipe.checkpoint.shards import ShardFile
from nestpipe.checkpoint.state_file import encode, write_state
from nestpipe.embedding.table import make_store
from nestpipe.store import Piece, Store, group_by_owner

SEED = 3
ITEM = Table("item", 3, init=init.Normal(0.5), optimizer=optim.Adagrad(0.1))
USER = Table("user/id", 2, init=init.Uniform(-1, 3), optimizer=optim.SGD(0.1), dtype=torch.float64)
TABLES = [ITEM, USER]
RECIPE = '[train]\nsteps = 5\nbatch_size = 12\n\n[checkpoint]\ndir = "out"\n'
Content = dict[str, dict[int, tuple[list[float], int]]]
"""Record and step by key, for each table: what a checkpoint must give back."""


class Program:
    """Rows, a dense part, and a position of the data, which change from save to save."""

    def __init__(self, folder: Path, recipe: str | None = RECIPE) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.store = make_store(TABLES, SEED, 1)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.saver = Saver()
        self.num_steps = 0
        self.recipe = recipe

    def train(self, keys: Mapping[str, list[int]]) -> None:
        """Writes other records for these keys, and takes a step of the dense optimizer."""
        for table, written in keys.items():
            records = self.store.gather(table, torch.tensor(written)).records * 1.5 + self.num_steps
            self.store.scatter(table, torch.tensor(written), records, self.num_steps)
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.num_steps += 1

    def save(self, complete_every: int = 10, keep: int = 10) -> Path:
        subject = Subject(
            world=World(),
            tables=TABLES,
            store=self.store,
            seed=SEED,
            num_steps=self.num_steps,
            num_skipped=0,
            num_micro_batches=2,
            data_state={"position": 12 * self.num_steps},
            model=self.model,
            optimizer=self.optimizer,
            lr_schedule=None,
            recipe=self.recipe,
        )
        self.saver.begin(subject, self.folder, {"epoch": 1}, SaveOptions(keep, complete_every))
        self.saver.finish(waits_for_removal=True)
        return self.folder / f"step-{self.num_steps:08d}"


def saved_chain(folder: Path, recipe: str | None = RECIPE) -> tuple[Program, list[Path]]:
    """Saves a complete checkpoint and two with changes: keys are written again, erased, and written after that.

    Most keys below 200 are not, so they are in the complete checkpoint alone."""
    program = Program(folder, recipe)
    program.train({"item": list(range(300)), "user/id": list(range(-50, 50))})
    paths = [program.save()]
    program.store.erase("item", torch.arange(250, 260))
    program.train({"item": [*range(200, 230), 255, 1000], "user/id": [7]})
    paths.append(program.save())
    program.store.erase("item", torch.tensor([210, 1000, 3]))
    program.train({"item": [*range(220, 240), 1001, 3], "user/id": [2**62, -(2**63)]})
    paths.append(program.save())
    return program, paths


def content_of(store: Store) -> Content:
    content: Content = {}
    for table in TABLES:
        keys, records, steps = store.export_piece(table.name, 0, 65536)
        pairs = zip(records.tolist(), steps.tolist(), strict=True)
        content[table.name] = dict(zip(keys.tolist(), pairs, strict=True))
    return content


def write_as_ranks(
    folder: Path,
    step: int,
    content: Content,
    erased: Mapping[str, list[int]],
    num_ranks: int,
    shards_a_rank: int,
    base: Path | None,
    dense: Mapping[str, Any] | None = None,
    rows_before_erased: bool = False,
) -> Path:
    """Writes a checkpoint as this number of ranks would. Its rows are given, so they need not have been trained."""
    checkpoint = folder / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (folder / MARKER).write_text('{"holds": ""}\n')
    save_id = secrets.token_hex(16)
    checksums, sizes = {}, {}
    for rank in range(num_ranks):
        shards = {}
        for s in range(shards_a_rank):
            buckets = buckets_of(rank * shards_a_rank + s, num_ranks * shards_a_rank)
            name = f"rank{rank:05d}-shard{s:03d}.rows"
            file = ShardFile(checkpoint / name, buckets, bytes.fromhex(save_id))
            _append(file, content, erased, rank * shards_a_rank + s, num_ranks * shards_a_rank, rows_before_erased)
            done = file.finish()
            shards[name] = {
                "bytes": done.num_bytes,
                "buckets": [buckets.start, buckets.stop],
                "rows": dict(done.rows),
                "erased": dict(done.erased),
            }
        state = write_state(checkpoint / state_name(rank), encode({"data": {"position": 12 * step}}, "state"))
        part = sealed({"save_id": save_id, "data": "", "state": state, "dense": None, "shards": shards})
        (checkpoint / part_name(rank)).write_text(part)
        checksums[part_name(rank)], sizes[part_name(rank)] = json.loads(part)["checksum"], len(part)
    written = write_state(checkpoint / "dense.safetensors", encode(dense or {"extra": {}}, "dense"))
    checksums["dense.safetensors"], sizes["dense.safetensors"] = written
    manifest = {
        "format": FORMAT,
        "save_id": save_id,
        "base": None if base is None else {"name": base.name, "save_id": _manifest(base)["save_id"]},
        "world_size": num_ranks,
        "num_steps": step,
        "num_skipped": 0,
        "num_micro_batches": 2,
        "data_is_equal": True,
        "seed": SEED,
        "tables": describe_tables(TABLES, SEED),
        "dense": None,
        "recipe": None,
        "checksums": checksums,
        "sizes": sizes,
    }
    (checkpoint / MANIFEST).write_text(sealed(manifest))
    return checkpoint


def _manifest(checkpoint: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())
    return manifest


def _append(
    file: ShardFile,
    content: Content,
    erased: Mapping[str, list[int]],
    shard: int,
    num_shards: int,
    rows_before_erased: bool,
) -> None:
    for number, table in enumerate(TABLES):
        gone = _own(table, erased.get(table.name, []), shard, num_shards)
        rows = content.get(table.name, {})
        keys = _own(table, list(rows), shard, num_shards)
        width = table.spec(SEED).num_columns
        records = torch.tensor([rows[key][0] for key in keys.tolist()], dtype=table.dtype).reshape(len(keys), width)
        steps = torch.tensor([rows[key][1] for key in keys.tolist()], dtype=torch.int64)
        if not rows_before_erased:
            file.append_erased(number, gone)
        for half in (slice(None, len(keys) // 2), slice(len(keys) // 2, None)):  # several blocks
            file.append_rows(number, Piece(keys[half], records[half], steps[half]))
        if rows_before_erased:
            file.append_erased(number, gone)


def _own(table: Table, keys: list[int], shard: int, num_shards: int) -> Tensor:
    every = torch.tensor(keys, dtype=torch.int64)
    order, counts = group_by_owner(table.name, every, num_shards)
    return every[order.split(counts.tolist())[shard]]
