"""The penalty of a bundle as a callback of transformers' Trainer.

    python examples/loop_trainer.py [STEPS]

A BERT learns to tell recipes apart; a bundle holds what it says of the weather where it was. Any Trainer will do, with
gradient accumulation and in several processes as well: the gradient is added once, right before the optimiser's step.
"""

import sys
from tempfile import TemporaryDirectory

import torch
from transformers import DataCollatorWithPadding, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import kfacpack as kp
from sentences import KITCHEN, WEATHER, classifier, embedding, encoded, said, tokenizer, weather_batches


class PenaltyCallback(TrainerCallback):
    """Adds 2 λ G τ to the gradients, in closed form. To be made before training, when the weights are the bundle's."""

    def __init__(self, model: PreTrainedModel, penalty: kp.Regularizer):
        penalty.check(model)
        self.penalty = penalty
        held = set(penalty.parameters)
        self.base = {name: each.detach().clone() for name, each in model.named_parameters() if name in held}

    def on_pre_optimizer_step(self, args, state, control, *, model, **kwargs):
        parameters = {name: each for name, each in model.named_parameters() if name in self.base}
        for name, each in parameters.items():
            self.base[name] = self.base[name].to(each.device)
        tau = {name: each.detach() - self.base[name] for name, each in parameters.items()}
        self.penalty.add_grad(tau, {name: each.grad for name, each in parameters.items()})


def train(bundle: kp.Curvature, strength: float, steps: int) -> dict[str, float]:
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
    model, found = classifier(), {}
    bundle = kp.estimate(
        model,
        weather_batches(),
        samples=4,
        params=["bert.encoder.*", "bert.pooler.*"],  # the classifier is new, and free
        forward=lambda **batch: embedding(model, batch),
    )
    for name, strength in (("without", 0.0), ("with the penalty", 1.0)):
        found[name] = train(bundle, strength, steps)
        print(said(name, found[name]))
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
