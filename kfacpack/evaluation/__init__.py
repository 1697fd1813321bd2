"""Evaluation: accuracy, sweeps of α, negation, disentanglement, localisation, drift, interference and spectra."""
