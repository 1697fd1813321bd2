"""The file: one safetensors container, one manifest, a seal over both. Nothing in this package imports torch.

Files on the Hub, by name: what everything that reads a bundle or a vector accepts. Nothing here imports torch.
"""
