"""Private parts of torch: one test per function of `kfacpack._torch`, on tiny graphs.

A test that fails here names the function of `kfacpack/_torch.py` to adapt to the installed torch version.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from kit import refused
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import kfacpack as kp
from kfacpack import _torch
from kfacpack.linearization.jvp_mode import JvpMode, TangentMap

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[1]


def leaf(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def constant(*shape):
    return leaf(*shape).detach()


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


NODES = {
    "Addmm": lambda: torch.addmm(leaf(4), constant(2, 3), leaf(3, 4)),
    "Mm": lambda: constant(2, 3) @ leaf(3, 4),
    "Bmm": lambda: torch.bmm(constant(1, 2, 3), leaf(1, 3, 4)),
    "Convolution": lambda: F.conv1d(constant(2, 3, 5), leaf(4, 3, 2)),
    "Embedding": lambda: F.embedding(torch.tensor([0, 1]), leaf(3, 4)),
    "Add": lambda: leaf(3) + constant(3),
    "Sub": lambda: leaf(3) - constant(3),
    "Mul": lambda: leaf(3) * constant(3),
    "NativeLayerNorm": lambda: F.layer_norm(constant(2, 3), (3,), leaf(3)),
    "Expand": lambda: leaf(1, 3).expand(2, 3),
    "Repeat": lambda: leaf(1, 3).repeat(2, 1),
    "T": lambda: leaf(2, 3).t(),
    "Transpose": lambda: leaf(2, 3).transpose(0, 1),
    "Permute": lambda: leaf(2, 3).permute(1, 0),
    "View": lambda: leaf(2, 3).view(6),
    "UnsafeView": lambda: constant(2, 2, 3) @ leaf(3, 4),
    "ReshapeAlias": lambda: aten._reshape_alias(leaf(2, 3), (6,), (1,)),
    "Unsqueeze": lambda: leaf(3).unsqueeze(0),
    "ToCopy": lambda: leaf(3).float(),
    "Alias": lambda: aten.alias(leaf(3)),
}


@pytest.mark.parametrize("name", NODES)
def test_operation_name(name):
    assert _torch.operation_name(NODES[name]().grad_fn) == name


def test_operation_name_of_a_custom_function():
    assert _torch.operation_name(Custom.apply(leaf(3)).grad_fn) == "CustomBackward"


def test_operation_names_in_tables_are_tested():
    from kfacpack.estimation.operations import MATRIX_OPERATIONS, OPERATION_KINDS, VECTOR_OPERATIONS

    tables = {name for name, _ in (*MATRIX_OPERATIONS, *VECTOR_OPERATIONS)} | set(OPERATION_KINDS)
    tables |= _torch.RESHAPING_OPERATIONS | _torch.VIEW_OPERATIONS
    assert tables - set(NODES) == {"Linear"}, "only other devices have Linear as an operation of its own"


def test_accumulated_leaf():
    w = leaf(3)
    node = (w * 2).grad_fn
    assert _torch.accumulated_leaf(node) is None
    assert _torch.accumulated_leaf(node.next_functions[0][0]) is w


@pytest.mark.parametrize(
    ("make", "name", "expected"),
    [
        (lambda: torch.addmm(leaf(4), constant(2, 3), leaf(3, 4)), "mat1", constant(2, 3)),
        (lambda: torch.addmm(leaf(4), leaf(2, 3), constant(3, 4)), "mat2", constant(3, 4)),
        (lambda: torch.addmm(leaf(4), leaf(2, 3), leaf(3, 4), beta=0.5), "beta", 0.5),
        (lambda: constant(2, 3) @ leaf(3, 4), "self", constant(2, 3)),
        (lambda: leaf(2, 3) @ constant(3, 4), "mat2", constant(3, 4)),
        (lambda: torch.bmm(constant(1, 2, 3), leaf(1, 3, 4)), "self", constant(1, 2, 3)),
        (lambda: torch.bmm(leaf(1, 2, 3), constant(1, 3, 4)), "mat2", constant(1, 3, 4)),
        (lambda: torch.add(constant(3), leaf(3), alpha=0.5), "alpha", 0.5),
        (lambda: torch.sub(constant(3), leaf(3), alpha=0.5), "alpha", 0.5),
        (lambda: leaf(3) * constant(3), "other", constant(3)),
        (lambda: constant(3) * leaf(3), "self", constant(3)),
    ],
)
def test_saved(make, name, expected):
    value = _torch.saved(make().grad_fn, name)
    assert torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected


def test_saved_of_a_version_that_saves_something_else():
    with refused(kp.KfacpackError, "nothing", "Mul", torch.__version__):
        _torch.saved((leaf(3) * 2).grad_fn, "nothing")


def test_product_scales():
    assert _torch.product_scales(torch.addmm(leaf(4), leaf(2, 3), leaf(3, 4), alpha=2, beta=3).grad_fn) == (2, 3)
    assert _torch.product_scales((leaf(2, 3) @ leaf(3, 4)).grad_fn) == (1, 1)
    assert _torch.product_scales(torch.add(leaf(3), leaf(3), alpha=2).grad_fn) == (2, 1)


def test_slice_start():
    assert _torch.slice_start(leaf(5, 2)[3:].grad_fn) == 3
    assert _torch.slice_start(leaf(5).exp().grad_fn) is None


def test_output_count():
    assert _torch.output_count(leaf(6).split(2)[0].grad_fn) == 3
    assert _torch.output_count(leaf(6).exp().grad_fn) == 1


def test_output_shape():
    assert _torch.output_shape((leaf(2, 3) @ leaf(3, 4)).grad_fn) == (2, 4)
    assert _torch.output_shape(leaf(5).split([2, 3])[0].grad_fn, 1) == (3,)


def test_input_shape():
    node = (leaf(2, 3) @ leaf(3, 4)).grad_fn
    assert [_torch.input_shape(node, slot) for slot in (0, 1)] == [(2, 3), (3, 4)]


def test_call_backward():
    a, b = leaf(2, 3), leaf(3)
    node = (a * b).grad_fn
    torch.testing.assert_close(_torch.call_backward(node, 0, 0, constant(2, 3)), constant(2, 3) * b.detach())
    torch.testing.assert_close(_torch.call_backward(node, 0, 1, constant(2, 3)), (constant(2, 3) * a.detach()).sum(0))
    parts = leaf(5).split([2, 3])
    assert _torch.call_backward(parts[0].grad_fn, 1, 0, torch.ones(3).double()).tolist() == [0, 0, 1, 1, 1]


def test_call_backward_of_a_custom_function():
    f = Custom.apply(leaf(3))  # keeps the node alive, which its Python object alone does not in torch 2.6
    with refused(kp.KfacpackError, "Custom"):
        _torch.call_backward(f.grad_fn, 0, 0, constant(3))


def test_convolution_arguments():
    x = constant(2, 4, 5, 6)
    f = F.conv2d(x, leaf(6, 2, 2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    images, *geometry = _torch.convolution_arguments(f.grad_fn)
    assert torch.equal(images, x)
    assert list(map(tuple, geometry[:4])) == [(2, 3), (2, 1), (1, 0), (1, 2)]
    assert geometry[4:] == [False, 2]
    assert _torch.convolution_arguments(F.conv_transpose1d(constant(2, 4, 5), leaf(4, 3, 2)).grad_fn).transposed


def test_embedding_arguments():
    indices = torch.tensor([[0, 2], [1, 1]])
    saved_indices, padding, by_frequency = _torch.embedding_arguments(F.embedding(indices, leaf(3, 4)).grad_fn)
    assert torch.equal(saved_indices, indices)
    assert (padding, by_frequency) == (-1, False)
    f = F.embedding(indices, leaf(3, 4), padding_idx=1, scale_grad_by_freq=True)
    assert _torch.embedding_arguments(f.grad_fn)[1:] == (1, True)


def test_layer_norm_rows():
    x = constant(2, 3)
    rows = _torch.layer_norm_rows(F.layer_norm(x, (3,), leaf(3), leaf(3)).grad_fn)
    torch.testing.assert_close(rows, F.layer_norm(x, (3,)))


def test_missing_jvp_parts(monkeypatch):
    assert _torch.missing_jvp_parts() == ()
    monkeypatch.delattr(torch._C, "_DisableAutocast")
    assert _torch.missing_jvp_parts() == ("torch._C._DisableAutocast",)


def test_import_without_the_private_parts(monkeypatch):
    """The package can be imported with a torch that lacks them, and reports which are missing."""
    import torch.utils._python_dispatch as dispatch

    monkeypatch.delattr(dispatch, "TorchDispatchMode")
    monkeypatch.delattr(torch._C, "_DisableTorchDispatch")
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    module = types.ModuleType("kfacpack._torch_again")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(Path(_torch.__file__).read_text(encoding="utf-8"), _torch.__file__, "exec"), module.__dict__)
    assert len(module.missing_jvp_parts()) == 3
    assert module.backward_retains_graph() is True


def test_autocast_disabled():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        with _torch.autocast_disabled():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


class Recording(_torch.DispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode():
    with Recording() as mode:
        nn.Linear(3, 4).double()(constant(2, 3)).tanh()
    assert {aten.addmm.default, aten.tanh.default} <= set(mode.operators)


class WithTangent(_torch.DispatchMode):
    """The tangent of sin along ones."""

    tangent = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with _torch.forward_ad_below_autograd():
            duals = [forward_ad.make_dual(tensor.detach(), torch.ones_like(tensor)) for tensor in args]
            out = func(*duals)
            self.tangent = _torch.tangent_of_dual(out)
        return out


@pytest.fixture
def warmed_up():
    """The first use of forward mode makes torch emit a warning."""
    JvpMode(TangentMap(), keeps_graph=True)


def test_forward_ad_below_autograd(warmed_up):
    x = leaf(3)
    with WithTangent() as mode:
        y = x.sin()
    torch.testing.assert_close(mode.tangent, x.detach().cos())
    assert not mode.tangent.requires_grad
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, x.detach().cos())


def test_forward_ad_below_autograd_is_visible_on_request(warmed_up):
    class Visible(WithTangent):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with _torch.forward_ad_below_autograd(visible=True):
                return func(*(forward_ad.make_dual(tensor.detach(), torch.ones_like(tensor)) for tensor in args))

    x = constant(3)
    with Recording() as outer, Visible():
        x.sin()
    assert {aten.sin.default, aten.cos.default} <= set(outer.operators)


def test_tangent_of_dual(warmed_up):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(constant(3), torch.ones(3).double())
        assert torch.equal(_torch.tangent_of_dual(dual * 2), torch.full((3,), 2.0).double())
        assert _torch.tangent_of_dual(dual > 0) is None
        assert _torch.tangent_of_dual(constant(3)) is None
    assert torch._efficientzerotensor(3)._is_zerotensor()
    assert not torch.zeros(3)._is_zerotensor()


def test_is_mutating():
    assert _torch.is_mutating(aten.add_.Tensor)
    assert not _torch.is_mutating(aten.add.Tensor)


def test_bound_arguments():
    bound = _torch.bound_arguments(aten.addmm.default, (1, 2), {"mat2": 3, "beta": 4})
    assert bound == {"self": 1, "mat1": 2, "mat2": 3, "beta": 4, "alpha": 1}


def test_attention_operators():
    with Recording() as mode:
        F.scaled_dot_product_attention(*(torch.randn(1, 2, 4, 8) for _ in range(3)))
    assert set(mode.operators) & set(_torch.attention_operators()), mode.operators


def test_softmax_backward():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    u = torch.randn(2, 3, 4, dtype=torch.float64)
    p = torch.softmax(x, dim=-1)
    (expected,) = torch.autograd.grad(p, x, u)
    torch.testing.assert_close(_torch.softmax_backward(u, p.detach()), expected)


def test_unsafe_view_operator():
    with Recording() as mode:
        torch.randn(2, 3, 4) @ torch.randn(4, 5)
    assert _torch.unsafe_view_operator() in mode.operators, mode.operators


def test_base_of():
    base = leaf(2, 3).exp()
    assert _torch.base_of(base) is base
    assert _torch.base_of(base[0].view(3, 1)) is base


def test_memory_address():
    base = constant(4)
    assert _torch.memory_address(base[2:]) == _torch.memory_address(base) != 0
    assert _torch.memory_address(torch._efficientzerotensor(3)) == 0


def test_written_arguments():
    a, b = constant(3), constant(3)
    assert _torch.written_arguments(aten.add_.Tensor, (a, b), {}) == [a]
    assert _torch.written_arguments(aten.add.out, (a, a), {"out": b})[0] is b


def test_callable_of():
    assert _torch.callable_of(aten.mul.Tensor) is aten.mul.Tensor._op
    assert _torch.callable_of(aten.mul.Tensor)(constant(2), 2.0).equal(2 * constant(2))
    assert _torch.callable_of(3) == 3


def product_inside(context):
    x = leaf(2, 2).detach().float().requires_grad_()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), context():
        y = x @ torch.ones(2, 2)
    return y.dtype, y.requires_grad, y.is_inference()


def test_below_autograd():
    assert product_inside(_torch.below_autograd) == (torch.float32, False, False)


def test_below_autograd_without_bypass():
    assert product_inside(lambda: _torch.below_autograd(bypass=False)) == (torch.float32, False, False)


def test_tensor_versions():
    tensor = constant(3)
    before = _torch.tensor_versions([tensor, constant(2)])
    tensor.add_(1)
    assert _torch.tensor_versions([tensor, constant(2)]) == [before[0] + 1, before[1]]


def test_tensor_layouts():
    x = leaf(2, 3)
    (layout,) = _torch.tensor_layouts([x])
    assert layout == (torch.Tensor, (2, 3), (3, 1), 0, torch.float64, torch.device("cpu"))
    x.register_hook(lambda gradient: None)
    assert _torch.tensor_layouts([x]) != [layout]


def test_global_module_hooks():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    assert any(_torch.global_module_hooks())
    handle.remove()
    assert not any(_torch.global_module_hooks())


def test_add_each():
    targets = [constant(2), constant(3)]
    _torch.add_each(targets, [torch.ones(2), torch.ones(3).double()])
    assert targets[0].equal(constant(2) + 1)
    assert targets[1].equal(constant(3) + 1)
    _torch.add_each([], [])


def test_backward_retains_graph():
    seen = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(_torch.backward_retains_graph())
            return g

    y = Asks.apply(leaf(3)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


def test_is_number_read():
    read = []

    class Record(_torch.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            read.append(_torch.is_number_read(func))
            return func(*args, **(kwargs or {}))

    with Record():
        (torch.ones(2) + 1).sum().item()
    assert read[-1]
    assert read.count(True) == 1


def test_eager_mode():
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    with _torch.eager_mode():
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    assert not compilations


PRIVATE = re.compile(
    r"_saved_|Backward\d|_input_metadata|torch\._[a-z]|torch\._C|_DisableAutocast|_DisableTorchDispatch"
    r"|_python_dispatch|_should_skip_dynamo|_get_current_graph_task|\._schema|_set_fwd_grad|_is_zerotensor|\._is_view"
    r"|\._version\b|\._base\b|aten\._|_scaled_dot_product|_AutoDispatch|\._op\b|_backward_hooks|\"_global_"
)


def test_private_parts_are_used_in_one_module():
    allowed = {"kfacpack/_torch.py", "kfacpack/_compat.py"}
    paths = [path for top in ("kfacpack", "cli") for path in (ROOT / top).rglob("*.py")]
    users = {str(path.relative_to(ROOT)) for path in paths if PRIVATE.search(path.read_text(encoding="utf-8"))}
    assert users - allowed == set()
    assert "kfacpack/_torch.py" in users


def test_every_function_has_a_test():
    tests = Path(__file__).read_text(encoding="utf-8")
    public = [name for name, value in vars(_torch).items() if getattr(value, "__module__", "") == _torch.__name__]
    functions = [name for name in public if isinstance(getattr(_torch, name), types.FunctionType) and name[0] != "_"]
    assert len(functions) > 20
    assert [name for name in functions if f"def test_{name}" not in tests] == []


def test_add_each_with_a_factor():
    targets, tensors = [torch.ones(2), torch.ones(3, 1)], [torch.full((2,), 3.0), torch.full((3, 1), -5.0)]
    _torch.add_each(targets, tensors, 2.0)
    assert [target.unique().tolist() for target in targets] == [[7.0], [-9.0]]
    _torch.add_each([], [])


def test_copy_each():
    targets, tensors = [torch.ones(2), torch.ones(3, 1)], [constant(2).float(), constant(3, 1).float()]
    _torch.copy_each(targets, tensors)
    assert all(map(torch.equal, targets, tensors))


def test_set_to_zero():
    tensors = [torch.ones(2), torch.ones(3, 1)]
    _torch.set_to_zero(tensors)
    assert not any(tensor.any() for tensor in tensors)


def test_largest_magnitude():
    tensors = [torch.tensor([1.0, -4.0]), torch.ones(3, 1, dtype=torch.float64)]
    assert float(_torch.largest_magnitude(tensors)) == 4
    for value in (float("nan"), float("-inf"), 1e300):
        assert not _torch.largest_magnitude([*tensors, torch.tensor([1.0, value], dtype=torch.float64)]).isfinite()
