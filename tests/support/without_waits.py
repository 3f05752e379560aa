"""Spares tests, and the copies of processes that they start, what takes long and is of no use to any of them."""

import os
from types import SimpleNamespace

import torch

# Inductor reads which vector instructions the CPU has; that g++ has them too, it tries for seconds in each new cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.fsync = lambda handle: None  # no test loses its power, and a busy disk takes a second for a checkpoint
# Where there is no such device, each seeding writes down its stack, for an error that may come once there is one.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    kind.traceback = SimpleNamespace(format_stack=list)
