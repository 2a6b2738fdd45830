"""Evaluates a trained model: losses, metrics of clicks, ranks in a corpus, scores."""
