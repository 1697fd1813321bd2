"""Curvature: blocks, the forms of their matrices, the algebra on them, and saving and loading."""
