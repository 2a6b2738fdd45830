"""Keys in, rows out, gradients back."""
