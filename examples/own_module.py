"""Estimates and saves the curvature of your own nn.Module, and compares predicted with measured drift.

python examples/own_module.py own.kfac
"""

import sys

import torch
from torch import nn

import kfacpack as kp

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.GELU(), nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 10))
x = torch.randn(256, 1, 8, 8)  # your inputs; a DataLoader works as well

curvature = kp.estimate(model, x.split(32), samples=4)
curvature.save(sys.argv[1])

tau = {name: 0.01 * torch.randn_like(parameter) for name, parameter in model.named_parameters()}
changed = torch.func.functional_call(model, {name: p + tau[name] for name, p in model.named_parameters()}, x)
print(f"drift predicted by the bundle: {curvature.quadratic(tau):.5f}")
print(f"drift measured on the data:    {(changed - model(x)).square().sum(dim=1).mean():.5f}")
