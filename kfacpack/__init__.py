"""Estimates, stores, compresses and merges the Kronecker-factored curvature of models, and uses it in training.

The public names are listed in `__init__.pyi`. They are imported on first use, so that reading a manifest does not
import torch.
"""

from importlib.metadata import version

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = version("kfacpack")
