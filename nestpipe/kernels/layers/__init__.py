"""Layers of the sequence models in Triton: norms, positions, a whole HSTU layer."""
