"""Where the points of a run are written beside its own files: TensorBoard, a CSV file, Weights & Biases."""
