"""The training run: model, data, step, loop, metrics, checkpoint and the comparison of scopes."""
