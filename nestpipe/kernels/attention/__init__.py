"""Attention of HSTU and FuXi in Triton."""
