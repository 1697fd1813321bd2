"""Curvature: blocks, matrix forms, low-rank approximation, saving, loading and verification."""
