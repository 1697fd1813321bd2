"""The file: one safetensors container, one manifest, a seal over both. Nothing in this package imports torch."""
