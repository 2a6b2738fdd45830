"""Synthetic data: every sample is computed from the seed and its position."""
