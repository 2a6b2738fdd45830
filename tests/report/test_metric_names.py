"""Metrics have the same names on the terminal and on the page."""

from nestpipe.report.metric_names import metric_names


def test_names() -> None:
    """Fails if a ceiling counts as a metric, or the loss is shown twice."""
    fields = ("loss", "log_loss", "auc", "auc_ceiling", "num_samples", "normalised_entropy")
    names = {"log_loss": "log loss", "auc": "AUC", "normalised_entropy": "normalised entropy"}
    assert metric_names(fields) == names
    assert metric_names(["loss", "hr_at_10", "mrr"]) == {"loss": "loss", "hr_at_10": "HR@10", "mrr": "MRR"}
