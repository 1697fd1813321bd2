"""Compression of a curvature: codecs, their errors, and the choice of a codec per matrix for a budget."""
