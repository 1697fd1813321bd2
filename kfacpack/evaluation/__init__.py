"""Evaluation: accuracy, α sweeps and negation; and disentanglement, localisation, drift and spectra."""
