"""Hugging Face Hub: push, pull, model cards, search, and importers for published factors."""
