"""Between host and device without waiting for either. A copy from or to pageable memory waits for all that is queued.

PyTorch hands pinned memory out again only when the copies that use it are done, so nothing here keeps it.
"""

import torch
from torch import Tensor


def to_device(values, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers (nested lists or a tensor of the host) on the device, in the order of its stream."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def to_host(tensor: Tensor) -> Tensor:
    """A copy in flight: valid once an event that is recorded later has passed."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
