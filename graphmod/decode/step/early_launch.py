"""Programmatic dependent launch: a kernel may be launched before the one before it has ended, and waits for it itself.

(CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".)
"""

import functools

import torch


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether Triton kernels can on a device. Needs Triton."""
    import triton.language as tl

    known = torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    return known and torch.cuda.get_device_capability(device) >= (9, 0)
