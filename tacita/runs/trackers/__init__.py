"""Trackers: what a run measures, in the log of TensorBoard, MLflow or Weights & Biases. Each tool has one file."""
