"""Synthetic data. Every sample is computed from the seed and its position."""
