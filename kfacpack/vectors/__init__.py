"""Task vectors: the file format, the arithmetic and the merge methods."""
