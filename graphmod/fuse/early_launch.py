"""Programmatic dependent launch: a kernel may be launched before the one before it has ended, and waits for it itself.

(CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".) Before it waits, a kernel may not touch
what any kernel of the step writes: not only the one before it may still run, as that may let the next one start before
it has waited itself. Each kernel waits, so that one that has ended says the same of all before it. What comes before a
step has ended when the step begins, since a graph waits for it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

_WAIT, _LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether Triton kernels can on a device. Needs Triton."""
    import triton.language as tl

    known = torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    return known and torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(early: bool) -> dict[str, bool]:
    """For the launch of a Triton kernel."""
    return {"launch_pdl": True} if early else {}


def generated_can() -> bool:
    """Whether kernels that inductor generates can on the current device."""
    from graphmod.torch_private import TritonKernel, inductor_config

    known = hasattr(inductor_config.triton, "enable_pdl") and hasattr(TritonKernel, "_filter_pdl")
    return known and can_start_early(torch.device("cuda", torch.cuda.current_device()))


@contextlib.contextmanager
def every_kernel_waits_first(late: bool) -> Iterator[None]:
    """Lets each kernel that inductor generates for early launch begin with a wait.

    Inductor lets a kernel read before it waits what the kernel before it did not write, and leaves the wait out where
    it finds no need; see above why neither will do. Of several kernels in one, each has its own lines.

    Args:
        late: the next kernel may start when one has loaded all that it reads, which is inductor's own place for it.
            Else it may at once, before the wait.
    """
    from graphmod.torch_private import TritonKernel

    kernels: Any = TritonKernel
    before = kernels._filter_pdl

    def filtered(kernel: Any, code: Any) -> None:
        if not kernel._enable_pdl_codegen():  # of another thread
            return before(kernel, code)
        if late:
            before(kernel, code)
            code._lines[:] = [_WAIT, *_without(code._lines, _WAIT)]
        else:
            code._lines[:] = [_LAUNCH, _WAIT, *_without(code._lines, _LAUNCH, _WAIT)]

    kernels._filter_pdl = filtered
    try:
        yield
    finally:
        kernels._filter_pdl = before


def _without(lines: list[Any], *calls: str) -> list[Any]:
    return [line for line in lines if not isinstance(line, str) or line.strip() not in calls]
