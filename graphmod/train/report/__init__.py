"""What a run measures, logs and compares."""
