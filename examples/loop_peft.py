"""Trains a LoRA adapter of PEFT with a bundle as a penalty.

    python examples/loop_peft.py [STEPS]

A LoRA changes a weight by ΔW = s B A, and the penalty is the quadratic form of ΔW: with H = G ΔW, the gradient of
λ <ΔW, H> is 2 λ s H Aᵀ with respect to B and 2 λ s Bᵀ H with respect to A. `Regularizer.loss` computes H in closed
form; autograd only differentiates B A.
"""

from sentences import (  # isort: skip  (first: it makes torchvision importable for transformers)
    KITCHEN,
    WEATHER,
    classifier,
    compare,
    embedding,
    encoded,
    weather_bundle,
)

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor

import kfacpack as kp


def changes(model: PeftModel, adapter: str = "default") -> dict[str, Tensor]:
    """Returns τ of a LoRA: ΔW by the name of the weight in the base model, differentiable with respect to A and B."""
    return {
        f"{name}.weight": layer.get_delta_weight(adapter)
        for name, layer in model.get_base_model().named_modules()
        if isinstance(layer, LoraLayer)
    }


def train(bundle: kp.Curvature, strength: float, steps: int) -> dict[str, float]:
    """Trains on the kitchen texts; returns the loss and the drift on the weather texts."""
    model = classifier()
    penalty = kp.Regularizer(bundle, strength=strength)
    penalty.check(model)  # raises if the bundle belongs to other weights; PEFT renames the weights below
    weather, kitchen = encoded(WEATHER), encoded([text for text, _ in KITCHEN])
    labels = torch.tensor([label for _, label in KITCHEN])
    before = embedding(model, weather).detach()

    torch.manual_seed(0)
    targets = ["query", "value", "intermediate.dense", "output.dense"]
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=targets, modules_to_save=["classifier"]))
    optimizer = torch.optim.AdamW((parameter for parameter in lora.parameters() if parameter.requires_grad), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = lora(**kitchen, labels=labels).loss
        (loss + penalty.loss(changes(lora))).backward()
        optimizer.step()
    with torch.no_grad():
        drift = (embedding(lora.get_base_model(), weather) - before).square().sum(1).mean()
        return {"loss": float(lora(**kitchen, labels=labels).loss), "drift": float(drift)}


def main(steps: int = 40) -> dict[str, dict[str, float]]:
    """Trains without and with the penalty."""
    bundle = weather_bundle(["bert.encoder.*.weight"])
    return compare(lambda strength: train(bundle, strength, steps), 50.0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
