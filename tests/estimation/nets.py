"""Small networks that use parameters in every style, and brute-force references. All in float64.

Every net maps a batch to f (N, 3). Inputs have `EXAMPLES` rows by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

EXAMPLES, WIDTH, HEADS, TOKENS = 7, 8, 2, 4


class Transformer(nn.Module):
    """One block: patches or tokens, class token, positions, attention in the chosen style, feed-forward, `@ proj`."""

    def __init__(self, attention: str = "fused", batch_first: bool = True, stem: bool = True, norm: str = "layer"):
        super().__init__()
        self.batch_first = batch_first
        self.attention_style = attention
        self.conv = nn.Conv2d(3, WIDTH, 4, 4) if stem else None
        self.token = nn.Parameter(torch.randn(WIDTH))
        self.positions = nn.Parameter(0.3 * torch.randn(TOKENS + 1, WIDTH))
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH) if norm == "layer" else nn.RMSNorm(WIDTH) for _ in range(2))
        if attention == "fused":
            self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        elif attention == "stacked":
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        else:
            self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.proj = nn.Parameter(torch.randn(WIDTH, 3))
        self.scale = nn.Parameter(torch.tensor(0.3))
        for module in self.modules():
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                nn.init.normal_(module.weight)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.conv is None else self.conv(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.view(1, 1, -1).expand(len(h), -1, -1), h], dim=1) + self.positions
        h = h if self.batch_first else h.transpose(0, 1)
        h = h + self.attend(self.norm1(h))
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        h = h if self.batch_first else h.transpose(0, 1)
        return F.normalize(h[:, 0] @ self.proj, dim=-1) * self.scale.exp()

    def attend(self, h: Tensor) -> Tensor:
        if self.attention_style == "fused":
            return self.attn(h, h, h, need_weights=False)[0]
        q, k, v = self.qkv(h).chunk(3, -1) if hasattr(self, "qkv") else (self.q(h), self.k(h), self.v(h))
        n, r, _ = h.shape
        q, k, v = (t.view(n, r, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        weights = torch.softmax(q @ k.mT / (WIDTH // HEADS) ** 0.5, dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(n, r, -1))


class TextEncoder(nn.Module):
    """Embedding, one attention layer that masks padding, and the mean over all other positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.layer(self.words(input_ids), src_key_padding_mask=~attention_mask.bool())
        mask = attention_mask[..., None].double()
        return self.head((h * mask).sum(1) / mask.sum(1))


def images(count: int = EXAMPLES) -> Tensor:
    return torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def vectors(width: int, count: int = EXAMPLES) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def sentences(count: int = EXAMPLES, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(1, 11, (count, length), generator=generator)
    lengths = torch.randint(2, length + 1, (count,), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}


def deep_linear(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6, bias), nn.Linear(6, 4, bias), nn.Linear(4, 3, bias)).double()


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 6, bias), nn.Tanh(), nn.Linear(6, 4, bias), nn.ReLU(), nn.Linear(4, 3, bias)
    ).double()


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def jacobian(model: nn.Module, x: Tensor, names: Sequence[str]) -> Tensor:
    """Returns J (N, C, P), example by example; P counts the elements of the named parameters, in order."""
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def f(chosen: dict[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(model, {**state, **chosen}, (example[None],))[0]

    jacobians = []
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be batched over the outputs
        for example in x:
            jac = jacrev(f)({name: state[name] for name in names}, example)
            jacobians.append(torch.cat([jac[name].reshape(len(jac[name]), -1) for name in names], dim=1))
    return torch.stack(jacobians)


def ggn(model: nn.Module, x: Tensor, names: Sequence[str]) -> Tensor:
    """Returns 1/N Σ JᵀJ."""
    J = jacobian(model, x, names)
    return torch.einsum("nci,ncj->ij", J, J) / len(x)


def factors(model: nn.Module, x: Tensor, layer: str, reduce: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (B, A) of a linear layer by definition, from its inputs and the Jacobian of f at its output."""
    module = model.get_submodule(layer)
    A, B, positions = 0.0, 0.0, 0
    for example in x:
        inputs, jac = _at(model, module, example)
        if module.bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1)
        a, g = inputs.reshape(-1, inputs.shape[-1]), jac.reshape(len(jac), -1, jac.shape[-1])
        if reduce:
            a, g = a.mean(0, keepdim=True), g.sum(1, keepdim=True)
        A, B, positions = A + a.T @ a, B + torch.einsum("cri,crj->ij", g, g), positions + len(a)
    return B / len(x), A / positions


def _at(model: nn.Module, module: nn.Module, example: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a layer's input for one example, and the Jacobian of f at its output, (C, *shape of the output)."""
    recorded: dict[str, Tensor] = {}

    def f(delta: Tensor) -> Tensor:
        def shift(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            recorded["input"], recorded["output"] = inputs[0].detach(), output.detach()
            return output + delta

        handle = module.register_forward_hook(shift)
        result = model(example[None])[0]
        handle.remove()
        return result

    f(torch.zeros(()))
    return recorded["input"], jacrev(f)(torch.zeros_like(recorded["output"]))
