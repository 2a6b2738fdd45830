"""The names of metrics, as the terminal and the page show them."""

from collections.abc import Iterable

ABBREVIATIONS = ("auc", "mrr")


def metric_names(fields: Iterable[str]) -> dict[str, str]:
    """Returns by field what to show: AUC, HR@10, normalised entropy. Counts, ceilings and repeated numbers have no
    name."""
    shown = [field for field in fields if not (field.startswith("num_") or field.endswith("_ceiling"))]
    return {field: _name(field) for field in shown if not (field == "loss" and "log_loss" in shown)}


def _name(field: str) -> str:
    return field.replace("_at_", "@").upper() if field in ABBREVIATIONS or "_at_" in field else field.replace("_", " ")
