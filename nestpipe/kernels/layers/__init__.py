"""Layers of models of histories in Triton: norms, positions, a whole HSTU layer."""
