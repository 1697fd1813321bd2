"""The stand-in is as strict as a GPU, computes what the CPU computes, and counts."""

from __future__ import annotations

import pytest
import torch
from devices.conftest import assert_same
from torch import nn

pytestmark = pytest.mark.usefixtures("standin")


def test_new_memory_holds_nan(device):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.empty(5, dtype=dtype, device=device).isnan().all()
        assert torch.empty_like(torch.ones(2, 3, dtype=dtype, device=device)).isnan().all()


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: b + a,
        lambda a, b: a @ b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.copy_(b) @ b,
        lambda a, b: torch.where(b > 0, a, a),
        lambda a, b: a.add_(b),
        lambda a, b: nn.functional.linear(a, b),
        lambda a, b: torch.einsum("ij,jk->ik", a, b),
    ],
)
def test_a_tensor_on_the_cpu_is_refused(device, mix):
    with pytest.raises(RuntimeError, match="cpu"):
        mix(torch.ones(3, 3, device=device), torch.ones(3, 3))


def test_a_scalar_on_the_cpu_is_accepted_as_on_cuda(device):
    assert (torch.ones(2, device=device) * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_generators_of_the_cpu_and_integer_products_are_refused(device):
    with pytest.raises(RuntimeError, match="generator"):
        torch.empty(3, device=device).normal_(generator=torch.Generator())
    whole = torch.ones(2, 2, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match="not implemented"):
        whole @ whole


@pytest.mark.parametrize(
    "create",
    [
        lambda device: torch.zeros(2, dtype=torch.float64, device=device),
        lambda device: torch.ones(2, device=device).double(),
        lambda device: torch.ones(2, dtype=torch.float64).to(device),
        lambda device: torch.ones(2, device=device).sum(dtype=torch.float64),
        lambda device: torch.ones(2, device=device) * torch.tensor(2.0, dtype=torch.float64).to(device),
    ],
)
def test_float64_is_refused(device, create):
    with pytest.raises(RuntimeError, match="float64"):
        create(device)


def test_views_share_memory_and_gradients_agree(device):
    base = torch.zeros(4, 3, device=device)
    base.T[1].add_(2)
    base.view(-1)[0] = 5
    assert base[:, 1].tolist() == [2.0] * 4
    assert base[0, 0].item() == 5
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.GELU(), nn.Flatten(), nn.LayerNorm(27), nn.Linear(27, 2))
        x = torch.randn(5, 2, 4, 4)
    gradients = []
    for where in ("cpu", device):
        net.to(where).zero_grad()
        net(x.to(where)).square().sum().backward()
        gradients.append([parameter.grad.cpu() for parameter in net.parameters()])
    for actual, expected in zip(*gradients, strict=True):
        assert_same(actual, expected, 1e-5)


def test_autocast_casts_products_and_keeps_norms_in_float32(device):
    x = torch.ones(2, 3, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16
        assert nn.functional.layer_norm((x @ x.T), (2,)).dtype == torch.float32
        assert (x @ x.T).softmax(-1).dtype == torch.float32
        with torch.autocast(device.type, enabled=False):
            assert (x @ x.T).dtype == torch.float32


def test_kernels_copies_and_waits_are_counted_with_their_place(device, standin):
    x = torch.arange(6.0).to(device)
    with standin.recorded() as record:
        y = (x * 2).view(2, 3) + 1
        y.sum().item()
        bool(y.any())
        y.cpu()
        y.to("cpu", non_blocking=True)
        (y > 1).nonzero()
        y[y > 1]
        torch.ones(4).to(device)
    assert record.kernels >= 6
    assert [event.cause for event in record.waits] == [
        "item",
        "item",
        "copy to the CPU",
        "aten::nonzero",
        "aten::nonzero",
    ]
    assert [event.bytes for event in record.downloads] == [24, 24]
    assert [event.bytes for event in record.uploads] == [16]
    assert all(event.place.startswith("test_standin.py:") for event in record.events)
    with standin.recorded() as record:
        x + 1
    assert (record.kernels, record.events) == (1, [])


def test_memory_is_measured(device, standin):
    torch.standin.reset_peak_memory_stats()
    before = torch.standin.max_memory_allocated()
    x = torch.zeros(1000, device=device)
    del x
    assert torch.standin.max_memory_allocated() - before == 4000
    torch.standin.reset_peak_memory_stats()
    assert torch.standin.max_memory_allocated() == before
