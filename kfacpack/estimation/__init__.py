"""From a model and its inputs to curvature: tracing, planning, accumulation, probes, resuming, several processes."""
