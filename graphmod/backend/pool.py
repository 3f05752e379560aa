"""Memory pools of captures on a CUDA device."""

import weakref

import torch


class CudaPool:
    """A memory pool of the caching allocator that only captures allocate from."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._reserved = 0
        self.handle = torch.cuda.graph_pool_handle()

    def open_for(self, graph: torch.cuda.CUDAGraph) -> list[torch.cuda.CUDAGraph]:
        """Makes the pool ready for the capture of `graph`. PyTorch closes a pool for good with its last graph, as after
        a first capture that failed; the next capture then gets a new one.

        Returns:
            The graphs that keep the pool open; hold them until the capture has begun.
        """
        open_by = list(self._graphs)
        if not open_by:
            self.handle = torch.cuda.graph_pool_handle()
            self._reserved = 0
        self._graphs.add(graph)
        return open_by

    def abandon(self) -> None:
        """Leaves the pool to the graphs it has, because a capture that CUDA cut short left it in an unknown state."""
        self._graphs.clear()

    def grew(self, size: int) -> None:
        """Counts memory that a capture reserved; a pool keeps it until its last graph is gone.

        Counted, because `torch.cuda.memory_snapshot` corrupts Python's heap now and then (seen with torch 2.11).
        """
        self._reserved += max(size, 0)

    def bytes(self) -> int:
        """Bytes of GPU memory the pool has reserved."""
        return self._reserved if self._graphs else 0

    def release(self) -> None:
        """Gives the blocks nobody uses any more back to the driver."""
        torch.cuda.empty_cache()
