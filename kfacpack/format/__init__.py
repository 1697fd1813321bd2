"""Files: references, the safetensors container, manifests, the reader and the atomic writer.

A bundle is one safetensors file with a manifest and a seal that covers both. Files on the Hub are named by `hf://`
references, which every reader accepts. Nothing in this package imports torch.
"""

from kfacpack._compat import require

require("numpy", "pydantic", "safetensors")
