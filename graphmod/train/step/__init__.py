"""One training step, and what it becomes in a graph."""
