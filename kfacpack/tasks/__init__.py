"""Tasks that need no download: their pictures come with a pip dependency, or are drawn by code. One file each.

They are the same bytes on every machine: PNGs and tables are read without loss, random numbers are the raw stream of a
counter-based generator, and pixels are reckoned in whole numbers or element by element (see `kfacpack/drawing`). What
each should be is recorded as a hash.
"""
