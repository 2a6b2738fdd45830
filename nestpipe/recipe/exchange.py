"""The keys of [exchange]: how rows and gradients travel between ranks."""

from dataclasses import dataclass

from nestpipe.embedding.exchange.rounding import ROUNDING
from nestpipe.embedding.plan import WINDOWS
from nestpipe.recipe.key import key

AUTO = "auto"


@dataclass(frozen=True)
class ExchangeSection:
    window: str = key(
        "once", "send a row once for a batch, or again for each micro-batch", choices=WINDOWS, option="window"
    )
    cross_batch: bool = key(
        True,
        "nested: send rows that the batch before does not change while it trains, and return gradients that the next "
        "batch does not need while that one trains; needs data that do not depend on the last step",
        option="cross_batch",
    )
    row_dtype: str | None = key(
        None,
        "form of rows in messages; not set: the table's; others round",
        choices=tuple(ROUNDING),
        option="row_dtype",
    )
    gradient_dtype: str | None = key(
        None, "form of gradients in messages, likewise", choices=tuple(ROUNDING), option="gradient_dtype"
    )
    replicas: int = key(
        1,
        "groups of consecutive ranks, each with all rows of all tables; rows are exchanged inside a group, sums of "
        "gradients among groups. It divides the number of ranks",
        at_least=1,
    )
    check_replicas: int = key(
        0,
        "steps from one comparison of the rows that groups of ranks have in common to the next; 0: never",
        at_least=0,
        option="check_replicas",
    )
    hosts: int | str | None = key(
        None,
        "rows and gradients travel between hosts once for a host, not for each of its ranks: auto, which finds the "
        "hosts, or a number of hosts of consecutive ranks; not set: once for each rank",
        choices=(AUTO,),
        at_least=1,
    )
