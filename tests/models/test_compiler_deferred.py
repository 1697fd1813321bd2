"""Models are loaded without importing torch's compiler, which still works afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = """
import sys, torch
from kfacpack.models.families import load_model
load_model("timm:test_vit", weights="random")
load_model("tiny", weights="random")
"""
DEFERRED = """
import sys, torch
from kfacpack._compat import compiler_deferred
"""


@pytest.mark.parametrize(
    "program",
    [
        f"""{LOADED}
assert not {{"torch._dynamo", "torch._dynamo.utils"}} & set(sys.modules)
from timm.layers import disable_compiler
assert disable_compiler(lambda x: x + 1)(2) == 3
assert "torch._dynamo" in sys.modules
assert torch.compiler.disable.__module__ == "torch.compiler"
from torchvision.ops.roi_align import is_compile_supported as deferred
from torch._dynamo.utils import is_compile_supported
assert deferred("cpu") == is_compile_supported("cpu")
assert torch._dynamo.utils.is_compile_supported is is_compile_supported
""",
        f"""{DEFERRED}
with compiler_deferred():
    from torch._dynamo.utils import is_compile_supported, counters
assert torch._dynamo.utils.counters is counters
""",
        f"""{DEFERRED}
with compiler_deferred():
    from torch._dynamo.eval_frame import OptimizedModule
    assert sys.modules["torch._dynamo.utils"].__file__
assert torch._dynamo.OptimizedModule is OptimizedModule
""",
        f"""{DEFERRED}
import torch._dynamo
before = dict(sys.modules), sys.meta_path[:], torch.compiler.disable
with compiler_deferred():
    assert (dict(sys.modules), sys.meta_path, torch.compiler.disable) == before
""",
    ],
    ids=["model loaded", "other name imported", "other module imported", "compiler already loaded"],
)
def test_the_compiler_is_deferred_and_intact(program):
    subprocess.run([sys.executable, "-c", program], check=True)
