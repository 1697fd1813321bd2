"""Compression of a curvature: codecs, their errors, and the choice of codecs for a budget."""
