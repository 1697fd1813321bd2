"""An independent implementation of the published layout, written from its description without kfacpack.

A vision tower of linear layers under the names of its authors' code, with hooks that sum over examples in float64 and
divide like their code does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Attention on (positions, examples, width) with one linear layer for queries, keys and values."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        positions, examples, width = x.shape
        three = self.qkv(x.transpose(0, 1)).view(examples, positions, 3, self.heads, width // self.heads)
        q, k, v = (three[:, :, number].transpose(1, 2) for number in range(3))
        attended = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.proj(attended.transpose(1, 2).reshape(examples, positions, width)).transpose(0, 1)


class Feedforward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, heads), Feedforward(width, inner)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.resblocks = nn.ModuleList(blocks)


class ClassToken(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1)


class Tower(nn.Module):
    """The vision tower of an open_clip model in float64 under the published names."""

    def __init__(self, clip):
        super().__init__()
        own = {name: tensor.double() for name, tensor in clip.visual.state_dict().items()}
        width, blocks = len(own["class_embedding"]), clip.visual.transformer.resblocks
        self.conv1 = nn.Conv2d(3, width, clip.visual.conv1.kernel_size, clip.visual.conv1.stride, bias=False)
        self.cls_token_layer = ClassToken(width)
        self.positional_embedding = nn.Parameter(own["positional_embedding"])
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        inner = len(own["transformer.resblocks.0.mlp.c_fc.bias"])
        self.transformer = Transformer([Block(width, block.attn.num_heads, inner) for block in blocks])
        self.lin_proj = nn.Linear(width, own["proj"].shape[1], bias=False)
        self.double()
        names = {
            "cls_token_layer.class_embedding": "class_embedding",
            "attn.qkv.weight": "attn.in_proj_weight",
            "attn.qkv.bias": "attn.in_proj_bias",
            "attn.proj.": "attn.out_proj.",
        }
        state = {}
        for name in self.state_dict():
            old = name
            for new, before in names.items():
                old = old.replace(new, before)
            state[name] = own["proj"].T if name == "lin_proj.weight" else own[old]
        self.load_state_dict(state)

    def forward(self, x):
        x = self.cls_token_layer(self.conv1(x).flatten(2).transpose(1, 2))
        x = self.ln_pre(x + self.positional_embedding).transpose(0, 1)
        for block in self.transformer.resblocks:
            x = block(x)
        return F.normalize(self.lin_proj(self.ln_post(x[0])), dim=-1)


def factors_of(clip, batches, directions):
    """Returns aaT, ggT, ffT and N; `directions(number, f)` returns the directions of a batch, (M, N, C)."""
    tower = Tower(clip)
    aaT, ggT, ffT, inputs = {}, {}, {}, {}

    def add(sums, name, rows, divisor=1):
        sums[name] = sums.get(name, 0) + rows.mT @ rows / divisor

    def positions_of(name, tensor):
        """Returns R and whether positions are the first dimension."""
        first = "attn" not in name and name != "ln_pre" and tensor.dim() == 3
        return (tensor.shape[0 if first else 1] if tensor.dim() == 3 else 1), first

    def add_hooks(name, module):
        def forward(_, arguments, __):
            inputs[name] = arguments[0].detach()

        def backward(_, __, gradients):
            g = gradients[0].detach()
            R, first = positions_of(name, g)
            if isinstance(module, nn.Linear):
                add(ggT, f"{name}.weight", g.reshape(-1, g.shape[-1]), R)
            elif isinstance(module, nn.LayerNorm):
                normal = F.layer_norm(inputs[name], module.normalized_shape)
                for kind, gradient in (("weight", g * normal), ("bias", g)):
                    rows = gradient.sum(0 if first else 1) if gradient.dim() == 3 else gradient
                    add(ffT, f"{name}.{kind}", rows)
            else:
                add(ffT, f"{name}.class_embedding", g[:, 0])

        module.register_forward_hook(forward)
        module.register_full_backward_hook(backward)

    for name, module in tower.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | ClassToken):
            add_hooks(name, module)
    count = 0
    for number, batch in enumerate(batches):
        f = tower(batch.double().requires_grad_())
        count += len(batch)
        for name, module in tower.named_modules():
            if isinstance(module, nn.Linear):
                x = inputs[name]
                R, _ = positions_of(name, x)
                ones = [] if module.bias is None else [torch.ones_like(x[..., :1])]
                add(aaT, f"{name}.weight", torch.cat([x, *ones], -1).flatten(0, -2), R)
        for s in directions(number, f):
            (f * s).sum().backward(retain_graph=True)
    return aaT, ggT, ffT, count


def store(folder, prefix, aaT, ggT, ffT, count, dtype=torch.float32):
    """Writes the five files of a task."""
    for part, sums in (("aaT", aaT), ("ggT", ggT), ("ffT", ffT)):
        torch.save({name: matrix.to(dtype) for name, matrix in sums.items()}, folder / f"{prefix}_{part}.pt")
    for part in ("num_aaT", "num_ggT"):
        torch.save(torch.tensor([count]), folder / f"{prefix}_{part}.pt")
