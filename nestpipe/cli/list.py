"""`nestpipe list`: what a recipe can name."""

from enum import StrEnum
from typing import Annotated

import typer

from nestpipe import registry
from nestpipe.cli.this_rank import failed


class Kind(StrEnum):
    MODELS = "models"
    DATASETS = "datasets"
    OPTIMIZERS = "optimizers"
    METRICS = "metrics"


def list_entries(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="models, datasets, optimizers or metrics.")],
) -> None:
    """List what a recipe can name, those of installed packages included, a line each.

    Models are for model.kind, datasets for data.kind, optimizers for row_optimizer.kind, metrics for evaluate.metrics.
    """
    listed: registry.Registry = getattr(registry, kind.value)
    try:
        entries = list(listed.entries())
    except registry.RegistryError as error:
        raise failed(error, 2) from None
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        typer.echo(f"{entry.name:{width}}  {entry.summary}")
