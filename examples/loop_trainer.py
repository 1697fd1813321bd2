"""Uses a bundle as a penalty in a callback of the Trainer of transformers.

    python examples/loop_trainer.py [STEPS]

A BERT learns to classify kitchen texts, while a bundle keeps its outputs on weather texts from changing. The callback
works with any Trainer, also with gradient accumulation and several processes: the gradient of the penalty is added
once, right before the optimizer step.
"""

from sentences import (  # isort: skip  (first: it makes torchvision importable for transformers)
    KITCHEN,
    WEATHER,
    classifier,
    compare,
    embedding,
    encoded,
    tokenizer,
    weather_bundle,
)

import sys
from tempfile import TemporaryDirectory

import torch
from transformers import DataCollatorWithPadding, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import kfacpack as kp


class PenaltyCallback(TrainerCallback):
    """Adds 2 λ G τ to the gradients, in closed form.

    Create it before training, when the weights are those of the bundle.
    """

    def __init__(self, model: PreTrainedModel, penalty: kp.Regularizer):
        penalty.check(model)
        self.penalty = penalty
        names = set(penalty.parameters)
        self.base = {name: p.detach().clone() for name, p in model.named_parameters() if name in names}

    def on_pre_optimizer_step(self, args, state, control, *, model, **kwargs):
        """Adds the gradient of the penalty."""
        parameters = {name: p for name, p in model.named_parameters() if name in self.base}
        for name, p in parameters.items():
            self.base[name] = self.base[name].to(p.device)
        tau = {name: p.detach() - self.base[name] for name, p in parameters.items()}
        self.penalty.add_grad(tau, {name: p.grad for name, p in parameters.items()})


def train(bundle: kp.Curvature, strength: float, steps: int) -> dict[str, float]:
    """Trains on the kitchen texts; returns the loss and the drift on the weather texts."""
    model, words = classifier(), tokenizer()
    weather = encoded(WEATHER)
    before = embedding(model, weather).detach()
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=steps,
                learning_rate=5e-3,
                per_device_train_batch_size=20,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
                use_cpu=True,
                dataloader_pin_memory=False,
            ),
            DataCollatorWithPadding(words),
            [{**words(text, return_token_type_ids=False), "labels": label} for text, label in KITCHEN],
            callbacks=[PenaltyCallback(model, kp.Regularizer(bundle, strength=strength))],
        )
        trainer.train()
    model.eval()
    with torch.no_grad():
        loss = model(**encoded([text for text, _ in KITCHEN]), labels=torch.tensor([k for _, k in KITCHEN])).loss
        drift = (embedding(model, weather) - before).square().sum(1).mean()
    return {"loss": float(loss), "drift": float(drift)}


def main(steps: int = 30) -> dict[str, dict[str, float]]:
    """Trains without and with the penalty."""
    bundle = weather_bundle(["bert.encoder.*", "bert.pooler.*"])  # the classifier is new and not penalised
    return compare(lambda strength: train(bundle, strength, steps), 1.0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
