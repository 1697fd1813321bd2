"""How well a model does on tasks.

Why vectors add up or do not: disentanglement, localisation, drift, spectra. Each gives what its JSON says.
"""
