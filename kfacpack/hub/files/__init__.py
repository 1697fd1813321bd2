"""Files on the Hub, by name: what everything that reads a bundle or a vector accepts. Nothing here imports torch."""
