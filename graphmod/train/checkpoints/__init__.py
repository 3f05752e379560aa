"""What a run saves."""
