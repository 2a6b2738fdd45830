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
        names = listed.names()
    except registry.RegistryError as error:
        raise failed(error, 2) from None
    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name:{width}}  {_summary(listed, name)}")


def _summary(listed: registry.Registry, name: str) -> str:
    """Returns the line of an entry. A package that cannot be imported must not hide the others."""
    try:
        return listed.find(name).summary
    except registry.RegistryError as error:
        return " ".join(str(error).split())
