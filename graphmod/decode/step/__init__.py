"""One decode step for a batch of rows."""
