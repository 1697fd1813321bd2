"""Training a task vector: the penalty that a bundle stands for."""
