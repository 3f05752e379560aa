"""The model that is trained: built or loaded, and its attention."""
