"""How compiled code of a decode step runs. Imports torch and the core's `compiled`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from graphmod.compiled import shown

_MOST_COMPILED = 256  # batch sizes times kinds of sampling; dynamo's own limit is 8, and beyond it goes on uncompiled


@contextlib.contextmanager
def compiled_code(reads: Iterable[Tensor]) -> Iterator[None]:
    """Runs compiled code unseen by the recorder of a capture; `reads` are the tensors it reads by address.

    Raises:
        RuntimeError: in a capture, something would have to be compiled again.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    stance = torch.compiler.set_stance("fail_on_recompile") if capturing else contextlib.nullcontext()
    with shown(reads), stance, torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
        yield
