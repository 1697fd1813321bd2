"""Training of task vectors: trainer, regimes, and the curvature and data penalties."""
