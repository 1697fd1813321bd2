"""Task vectors: the file, what it says of itself, and the arithmetic on them."""
