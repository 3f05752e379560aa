"""Attention over the cache, and the choice between its kernels."""
