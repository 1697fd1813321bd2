"""Evaluation: accuracy, α sweeps, negation, disentanglement, localisation, drift, interference and spectra."""
