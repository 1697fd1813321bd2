"""LoRA of peft, regularised by a bundle.

    python examples/loop_peft.py [STEPS]

A LoRA moves a weight by ΔW = s B A. The same quadratic form holds it: with H = G ΔW, the gradient of λ <ΔW, H> is
2 λ s H Aᵀ at B and 2 λ s Bᵀ H at A. `Regularizer.loss` has H in closed form; autograd does the rest, through B A alone.
"""

from sentences import KITCHEN, WEATHER, classifier, embedding, encoded, said, weather_batches  # isort: skip  (first: it says why)

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor

import kfacpack as kp


def changes(model: PeftModel, adapter: str = "default") -> dict[str, Tensor]:
    """τ of a LoRA: the name of each weight, as the base model has it -> its ΔW, differentiable in A and B."""
    return {
        f"{name}.weight": layer.get_delta_weight(adapter)
        for name, layer in model.get_base_model().named_modules()
        if isinstance(layer, LoraLayer)
    }


def train(bundle: kp.Curvature, strength: float, steps: int) -> dict[str, float]:
    model = classifier()
    penalty = kp.Regularizer(bundle, strength=strength)
    penalty.check(model)  # the bundle is of these weights; peft renames them, so it is asked before
    weather, kitchen = encoded(WEATHER), encoded([text for text, _ in KITCHEN])
    labels = torch.tensor([label for _, label in KITCHEN])
    before = embedding(model, weather).detach()

    torch.manual_seed(0)
    targets = ["query", "value", "intermediate.dense", "output.dense"]
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=targets, modules_to_save=["classifier"]))
    optimizer = torch.optim.AdamW((each for each in lora.parameters() if each.requires_grad), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = lora(**kitchen, labels=labels).loss
        (loss + penalty.loss(changes(lora))).backward()
        optimizer.step()
    with torch.no_grad():
        drift = (embedding(lora.get_base_model(), weather) - before).square().sum(1).mean()
        return {"loss": float(lora(**kitchen, labels=labels).loss), "drift": float(drift)}


def main(steps: int = 40) -> dict[str, dict[str, float]]:
    model, found = classifier(), {}
    bundle = kp.estimate(
        model,
        weather_batches(),
        samples=4,
        params=["bert.encoder.*.weight"],
        forward=lambda **batch: embedding(model, batch),
    )
    for name, strength in (("without", 0.0), ("with the penalty", 50.0)):
        found[name] = train(bundle, strength, steps)
        print(said(name, found[name]))
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
