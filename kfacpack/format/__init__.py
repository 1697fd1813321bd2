"""File formats and file access: `hf://` references, safetensors containers, manifests, reading and atomic writing.

A bundle is a safetensors file with a manifest and a seal. The seal is a digest that covers the manifest and all
tensors. Files on the Hub are named by `hf://` references, which every reader accepts. Nothing in this package imports
torch.
"""

from kfacpack._compat import require

require("numpy", "pydantic", "safetensors")
