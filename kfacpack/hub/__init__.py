"""Bundles and vectors on the Hub, through huggingface_hub and its own log-in: read, published, found."""
