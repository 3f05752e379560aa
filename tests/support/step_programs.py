"""What captures of small steps show, for tests of what is made of that."""

import torch

from graphmod import CUDAGraphModule
from graphmod.config import CUDAGraphConfig
from graphmod.fuse.program import Observer
from graphmod.wrap.extension import memory_of, observed, serving


def program_of(step):
    """The program of a function without arguments or result, and its inputs."""
    wrapper = CUDAGraphModule(step, CUDAGraphConfig(warmup_steps=1), name="step")
    observer = Observer()
    with torch.inference_mode():
        wrapper()
        with observed(observer):
            wrapper()
    assert serving(wrapper) is not None, wrapper.last_failure
    return observer.program(*memory_of(serving(wrapper)))
