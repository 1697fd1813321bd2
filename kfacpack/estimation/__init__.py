"""Curvature estimation: tracing, block planning, accumulation, probes, resuming and distributed runs."""
