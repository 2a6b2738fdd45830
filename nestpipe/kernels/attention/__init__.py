"""Attention of HSTU and FuXi in Triton. Modules named triton_* hold the kernels."""
