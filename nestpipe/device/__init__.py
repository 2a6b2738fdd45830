"""Streams, graphs and memory of an accelerator; on a CPU the same calls do nothing."""
