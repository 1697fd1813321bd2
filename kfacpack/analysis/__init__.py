"""Why vectors add up or do not: disentanglement, localisation, drift, spectra. Each gives what its JSON says."""
