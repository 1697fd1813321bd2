"""What the processes of `tests/processes.py` have imported when they start: the libraries that commands need."""

from importlib import import_module

import torch
import torch._decomp.decompositions_for_jvp
import torch._dynamo  # imported by optimizers
import torch.distributed
import torch.fx.experimental.symbolic_shapes  # noqa: F401 - imported by torch.autograd.grad

from kfacpack._compat import make_torchvision_importable

make_torchvision_importable()
for name in ("open_clip", "timm", "kfacpack_cli.main", "kfacpack.training.train", "kfacpack.experiments.run"):
    import_module(name)
