"""Peak speeds of devices, from NVIDIA's data sheets: dense products of matrices, without sparsity."""

import torch

PEAKS = {
    "NVIDIA H200": (989e12, 494e12, 67e12),
    "NVIDIA H100 80GB HBM3": (989e12, 494e12, 67e12),
    "NVIDIA H100 PCIe": (756e12, 378e12, 51e12),
    "NVIDIA A100": (312e12, 156e12, 19.5e12),
}
"""By the beginning of a device's name: floating-point operations per second in bfloat16 or float16, in TF32, and in
float32."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the peak of a device for products in this dtype; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = next((peaks for start, peaks in PEAKS.items() if name.startswith(start)), None)
    if peaks is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return peaks[0]
    if dtype == torch.float32:
        return peaks[1] if torch.backends.cuda.matmul.allow_tf32 else peaks[2]
    return None
