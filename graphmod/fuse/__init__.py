"""Compiles captured steps: the operations of a capture in, kernels in the place of its graph out."""
