"""`nestpipe checkpoint`: says what is in checkpoints, verifies, compares and exports them."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from nestpipe.checkpoint import CheckpointError
from nestpipe.checkpoint.tools.diff import diff as compare
from nestpipe.checkpoint.tools.inspect import CheckpointInfo
from nestpipe.checkpoint.tools.inspect import inspect as look_into
from nestpipe.checkpoint.tools.saved import newest
from nestpipe.checkpoint.tools.verify import verify as read_all
from nestpipe.cli.checkpoint_show import show_checkpoint, show_difference, show_export, show_folder, show_verification
from nestpipe.cli.data_progress import show_stages
from nestpipe.cli.this_rank import check_writable, failed
from nestpipe.recipe.resume import may_change
from nestpipe.recipe.value import ConfigError

app = typer.Typer(
    help="Look into checkpoints: what is in them, are they intact, what differs. Export a model.", no_args_is_help=True
)

SavedModel = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of checkpoints, such as a checkpoint.dir.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="File for the result.")]


@app.command()
def inspect(path: SavedModel, file: JsonFile = None) -> None:
    """Show what is in a checkpoint, or list the checkpoints of a folder.

    A checkpoint: step, ranks, tables, dense part, position of the data.
    A folder: its checkpoints, the newest good one, and what is wrong with
    others. Names and sizes of files are checked. Their content is not
    read, so the command is fast for any size; verify reads everything.

    \b
    Examples:
      nestpipe checkpoint inspect out
      nestpipe checkpoint inspect out/step-00000060 --json content.json
    """
    with _reading():
        check_writable("--json", file)
        info = look_into(path)
    console = Console()
    if isinstance(info, CheckpointInfo):
        show_checkpoint(info, console)
    else:
        show_folder(info, console)
    _write_json(file, asdict(info))


@app.command()
def verify(path: SavedModel, file: JsonFile = None) -> None:
    """Read every byte of a checkpoint and compare all checksums.

    A checkpoint is verified with its bases, a folder with all its
    checkpoints. Each file that is wrong is printed, and how.

    \b
    Exit code: 0 if everything is right, 1 if anything is wrong, 2 if there
    is no checkpoint to verify.

    \b
    Examples:
      nestpipe checkpoint verify out
      nestpipe checkpoint verify out/step-00000060 --json problems.json
    """
    console = Console()
    with _reading():
        check_writable("--json", file)
        with show_stages(console) as report:
            result = read_all(path, report)
    show_verification(result, console)
    _write_json(file, asdict(result))
    if result.problems:
        raise typer.Exit(1)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, or a folder: its newest good one.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The one to compare it with.")],
    file: JsonFile = None,
) -> None:
    """Show what differs between two checkpoints.

    Compares steps, settings, rows, row state, the dense part, the position
    of the data and the recipe, whatever the numbers of ranks. Bits are
    compared: 0.0 and -0.0 differ. The number of ranks, how a checkpoint is
    based on others, and keys of the recipe that a resumed run may change
    are shown, but do not count as differences.

    \b
    Exit code: 0 if the content is equal, 1 if it differs, 2 on errors.

    \b
    Examples:
      nestpipe checkpoint diff out other-run
      nestpipe checkpoint diff out/step-00000040 out/step-00000060
    """
    console = Console()
    with _reading():
        check_writable("--json", file)
        paths = _newest(first, console), _newest(second, console)
        with show_stages(console) as report:
            result = compare(*paths, may_change, report)
    show_difference(result, console)
    _write_json(file, asdict(result) | {"is_equal": result.is_equal})
    if not result.is_equal:
        raise typer.Exit(1)


@app.command()
def export(
    path: SavedModel,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to make; it must be new or empty.")],
    with_state: Annotated[
        bool, typer.Option("--with-state", help="Add the row state of the optimizer and the step of each row.")
    ] = False,
) -> None:
    """Export a checkpoint to files that other programs read.

    \b
    DIR/model.json                   dims, dtypes, initial rows, files
    DIR/dense.safetensors            parameters, by their state_dict names
    DIR/TABLE/part-00000.parquet     columns key (int64) and row (floats)

    Of a folder of checkpoints, the newest good one is exported. Rows are
    streamed, so tables may be larger than memory. examples/serve.py loads
    DIR and scores with it, without nestpipe.

    \b
    Examples:
      nestpipe checkpoint export out --out exported
      nestpipe checkpoint export out/best --out exported --with-state
    """
    from nestpipe.checkpoint.tools.export import export as write_files

    console = Console()
    with _reading():
        checkpoint = _newest(path, console)
        with show_stages(console) as report:
            settings = write_files(checkpoint, out, with_state, report)
    show_export(checkpoint, out, settings, console)


@contextmanager
def _reading() -> Iterator[None]:
    """Reads with one thread. Prints an error as one line and ends with exit code 2."""
    torch.set_num_threads(1)  # blocks are small: to wake up other threads for each costs more than they save
    try:
        yield
    except (CheckpointError, ConfigError, OSError) as error:
        raise failed(error, 2) from None
    except KeyboardInterrupt:
        raise failed(RuntimeError("interrupted (Ctrl-C)"), 130) from None


def _newest(path: Path, console: Console) -> Path:
    """Returns the newest good checkpoint at a path. Prints what is wrong with newer ones."""
    checkpoint, problems = newest(path)
    for problem in problems:
        text = f"a damaged checkpoint is passed over: {problem}"
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    return checkpoint


def _write_json(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(_for_json(content), indent=2) + "\n")


def _for_json(value: Any) -> Any:
    """Returns a value with texts for paths and for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _for_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(entry) for entry in value]
    is_plain = not isinstance(value, Path) and not (isinstance(value, float) and not math.isfinite(value))
    return value if is_plain else str(value)
