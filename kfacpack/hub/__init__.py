"""Hugging Face Hub: push, pull, model cards, search, and importers of published factors."""
