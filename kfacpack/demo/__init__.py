"""Pictures drawn by code, the same bytes on every machine.

Conventions: N pictures at a time; a field is a float32 array (N, size, size). Coordinates run from -1 to 1 over a
picture, x to the right and y down. A coverage is a field between 0 (nothing) and 1 (ink). Only + - * / sqrt, floor and
comparisons are used, element by element: those are exact everywhere, while sines, sums and a font library's rasteriser
are not.
"""
