"""Programmatic dependent launch: a kernel may be launched before the one before it has ended, and waits for it itself.

(CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".) Before it waits, a kernel may not touch
what any kernel of the step writes: not only the one before it may still run, as that may let the next one start before
it has waited itself. Each kernel waits, so that one that has ended says the same of all before it. What comes before a
step has ended when the step begins, since a graph waits for it.
"""

import functools

import torch


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether Triton kernels can on a device. Needs Triton."""
    import triton.language as tl

    known = torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    return known and torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(early: bool) -> dict[str, bool]:
    """For the launch of a Triton kernel."""
    return {"launch_pdl": True} if early else {}
