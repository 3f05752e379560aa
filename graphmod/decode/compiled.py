"""How compiled code runs inside a capture. Imports torch.

Under a dispatch mode dynamo does not use what it compiled, and every capture is watched by one, the core's recorder. So
the mode is put aside while compiled code runs; on a GPU the stream is what captures, and misses nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_MOST_COMPILED = 256  # batch sizes times kinds of sampling; dynamo's own limit is 8, and beyond it goes on uncompiled


@contextlib.contextmanager
def compiled_code(reads: Iterable[Tensor]) -> Iterator[None]:
    """Runs compiled code unseen by the recorder.

    Args:
        reads: what that code reads by address. A view of each, which launches nothing, names it to the recorder, so
            that it is held and watched.
    """
    for tensor in reads:
        tensor.view(tensor.shape)
    modes = list(_get_current_dispatch_mode_stack())
    # Left one by one, and not hidden: dynamo also looks at flags that entering and leaving a mode set.
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    try:
        with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
            yield
    finally:
        for mode in modes:
            mode.__enter__()
