"""Prints what makes a run slow, and what each rank measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nestpipe.diagnosis.measurements import Array, Measurements

MOST_RANKS = 8
"""Ranks of which the numbers are shown: those that are latest."""
SHOWN_STAGES = ("prefetch", "retrieve", "dense", "sum_gradients", "update")


def show_slow(found: Sequence[Mapping[str, Any]], console: Console, is_asked: bool = False) -> None:
    """Prints a line for each thing that is slow. is_asked: says so if there is none."""
    for each in found:
        text = f"slow: {each['text']}; up to {each['cost_ms']:.1f} ms of a step"
        console.print(text, style="yellow", highlight=False, soft_wrap=True, markup=False)
    if is_asked and not found:
        text = "no rank, stage or link is slower than the others by 5% of a step"
        console.print(text, highlight=False, soft_wrap=True)


def show_measurements(measured: Measurements, console: Console) -> None:
    """Prints a table of ranks, and one of the links between hosts."""
    late = np.sum(list(measured.late_ms.values()), axis=0)
    ranks = np.sort(np.argsort(-late, kind="stable")[:MOST_RANKS])
    table = Table("ms a step", *(f"rank {rank}" for rank in ranks))
    for name, late_ms in measured.late_ms.items():
        table.add_row(f"enters the {name} late by", *_texts(late_ms[ranks]))
    for name, wait_ms in measured.wait_ms.items():
        table.add_row(f"in the {name}, or waiting for it", *_texts(wait_ms[ranks]))
    for stage in SHOWN_STAGES:
        table.add_row(stage, *_texts(measured.work_ms[stage][ranks]))
    table.add_row("keys that it owns", *(f"{keys:,.0f}" for keys in measured.owned_keys[ranks]))
    console.print(table)
    steps = f"medians over {measured.num_steps} steps of {measured.step_ms:.1f} ms"
    shown = f"the {MOST_RANKS} latest of {measured.num_ranks} ranks; " if measured.num_ranks > MOST_RANKS else ""
    console.print(f"{shown}{steps}", highlight=False)
    if not np.isnan(measured.links.mb_per_second).all():
        _show_links(measured, console)


def _show_links(measured: Measurements, console: Console) -> None:
    links = measured.links
    order = np.argsort(_means(links.mb_per_second), kind="stable")
    hosts = np.sort(order[:MOST_RANKS])
    table = Table("MB/s, measured after the training", *(f"to the host of rank {links.ranks[i]}" for i in hosts))
    for host in hosts:
        table.add_row(f"from the host of rank {links.ranks[host]}", *_texts(links.mb_per_second[host, hosts]))
    console.print(table)


def _means(rates: Array) -> Array:
    """Returns the mean rate that each host sends with; infinity where nothing is known."""
    return np.array([row[~np.isnan(row)].mean() if not np.isnan(row).all() else np.inf for row in rates])


def _texts(values: Array) -> list[str]:
    return ["" if np.isnan(value) else f"{value:.1f}" for value in values]
