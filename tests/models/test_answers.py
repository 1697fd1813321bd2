"""Label words of several tokens, completions, chat templates: likelihoods as transformers computes them, training."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from kit import refused
from models.conftest import write_lm

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable
from kfacpack.models.heads import AnswerHead, CompletionHead
from kfacpack.models.prompts import PROMPTS, Prompt
from kfacpack.tasks.task import DataOrigin

CLASSES = ("entailment", "neutral", "contradiction")
NOUNS = ["a dog", "the field", "nobody", "an animal", "the premise", "the claim"]


@dataclass
class Pairs:
    source: DataOrigin

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"premise": f"{NOUNS[index % 6]} runs", "hypothesis": f"{NOUNS[index // 2]} moves"}

    def label(self, index):
        return index % 3


@dataclass
class PairTask:
    name: str
    classes: tuple[str, ...] | None = CLASSES
    splits = ("train", "test")
    templates = ()
    source = "words"
    license = None

    def split(self, name):
        return Pairs(DataOrigin("words", name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_lm(tmp_path_factory.mktemp("lm"), "llama")


def stock_log_likelihood(folder, prompt, answer):
    """Returns the log-likelihood of the tokens of an answer after those of a prompt, by transformers alone."""
    make_torchvision_importable()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before, after = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, answer))
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([before + after])).logits[0].log_softmax(1)
    return sum(float(log_p[len(before) - 1 + k, token]) for k, token in enumerate(after)), len(after)


@pytest.fixture
def long_answers(monkeypatch):
    """A template whose answers have several tokens, two of them with the same first one, in another order."""
    answers = {"contradiction": " no maybe", "neutral": " maybe", "entailment": " no yes"}
    prompt = Prompt("{premise}. {hypothesis}?", answers)
    monkeypatch.setitem(PROMPTS["plain"], "long", prompt)
    return prompt


def test_labels_of_several_tokens_are_scored_by_their_likelihood(folder, long_answers):
    model, task = kp.load_model(f"lm:{folder}"), PairTask("long")
    split = task.split("train")
    head = kp.head_for(model, task)
    assert isinstance(head, AnswerHead)
    batch = model.prepare([split[k] for k in range(4)], task.name)
    with torch.no_grad():
        scores = head.logits(model.forward(**batch))
    assert scores.shape == (4, 3)
    for number in range(2):
        prompt = long_answers.template.format(**split[number])
        for k, name in enumerate(CLASSES):
            expected, _ = stock_log_likelihood(folder, prompt, long_answers.answers[name])
            assert float(scores[number, k]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_labels_of_several_tokens_are_trained_and_evaluated(folder, long_answers, regime, tmp_path):
    model, task = kp.load_model(f"lm:{folder}"), PairTask("long")
    curvature = kp.estimate_task(model, task, examples=8, metric="kl")
    assert curvature.about.source.examples == 8
    vector = kp.train(model, task, steps=12, batch_size=12, lr=2e-3, regime=regime, output=tmp_path / "v.safetensors")
    assert not kp.TaskVector.load(tmp_path / "v.safetensors").heads
    losses = [json.loads(line)["loss"] for line in (tmp_path / "v.metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert kp.evaluate(model, task, vector=vector).examples == 12


def test_classes_that_a_template_does_not_distinguish_are_refused(folder, monkeypatch):
    model = kp.load_model(f"lm:{folder}")
    with refused(kp.KfacpackError, "same token", "entailing"):
        kp.head_for(model, PairTask("mine", ("entailing", "entailed")), kind="words")
    same = dict.fromkeys(CLASSES, " no maybe")
    monkeypatch.setitem(PROMPTS["plain"], "same", Prompt("{premise}", same))
    with refused(kp.KfacpackError, "neutral"):
        kp.head_for(model, PairTask("same"))
    monkeypatch.setitem(PROMPTS["plain"], "few", Prompt("{premise}", {"entailment": " yes no", "neutral": " no"}))
    with refused(kp.KfacpackError, "contradiction"):
        kp.head_for(model, PairTask("few"))


def test_a_template_without_its_column_is_refused(folder):
    model = kp.load_model(f"lm:{folder}")
    with refused(kp.KfacpackError, "sentence1, sentence2", "premise, hypothesis", "'rte'"):
        model.prepare([{"premise": "a", "hypothesis": "b"}], "rte")


def test_chat_templates(folder, tmp_path):
    with refused(kp.KfacpackError, "chat template", "plain"):
        kp.load_model(f"lm:{folder}", prompts="chat")
    chat = kp.load_model(f"lm:{write_lm(tmp_path / 'chat', 'llama', chat=True)}")
    assert "'chat'" in chat.preprocessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")
    batch = chat.prepare([{"prompt": "a dog", "completion": "runs"}], "texts")
    text = tokenizer.decode(batch["input_ids"][0])
    assert text == "<|user|>a dog<|end|><|assistant|>runs<|end|>"
    plain = kp.load_model(f"lm:{tmp_path / 'chat'}", prompts="plain")
    assert tokenizer.decode(plain.prepare([{"prompt": "a dog", "completion": " runs"}], "texts")["input_ids"][0]) == (
        "a dog runs<|end|>"
    )


def completions(verb, count=16):
    return [{"prompt": f"{NOUNS[k % 6]} {verb}", "completion": f" over {NOUNS[k // 3]}"} for k in range(count)]


def write_completions(folder, rows):
    folder.mkdir(parents=True)
    for split, chosen in (("train", rows), ("test", rows[:6])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return kp.load_task(folder.name, folder)


def test_completions_are_scored_by_likelihood_and_perplexity(folder, tmp_path):
    task, model = write_completions(tmp_path / "run", completions("runs")), kp.load_model(f"lm:{folder}")
    assert isinstance(kp.head_for(model, task), CompletionHead)
    score = kp.evaluate(model, task, batch_size=4)
    pairs = [
        stock_log_likelihood(folder, row["prompt"], row["completion"] + "<|end|>") for row in completions("runs")[:6]
    ]
    total, tokens = (sum(column) for column in zip(*pairs, strict=True))
    assert (score.examples, score.tokens) == (6, tokens)
    assert score.log_likelihood == pytest.approx(total, rel=1e-4)
    assert score.perplexity == pytest.approx(torch.tensor(-total / tokens).exp().item(), rel=1e-4)
    with refused(kp.KfacpackError, "lm:NAME"):
        kp.head_for(kp.load_model("tiny"), task)


def test_parquet_and_json_lines_give_the_same_examples(folder, tmp_path):
    import datasets

    lines = write_completions(tmp_path / "lines", completions("runs"))
    (tmp_path / "parquet").mkdir()
    datasets.Dataset.from_list(completions("runs")).to_parquet(tmp_path / "parquet" / "train.parquet")
    table = kp.load_task("texts", tmp_path / "parquet")
    assert lines.classes is table.classes is None
    assert [table.split("train")[k] for k in range(4)] == [lines.split("train")[k] for k in range(4)]
    (tmp_path / "lines" / "train.jsonl").write_text("{not json\n")
    with refused(kp.KfacpackError, "train.jsonl"):
        kp.load_task("lines", tmp_path / "lines").split("train")


@pytest.mark.filterwarnings("ignore::kfacpack.training.metrics.PenaltyWarning")
def test_the_penalised_sum_of_two_completion_tasks_has_a_lower_perplexity(folder, tmp_path):
    """Both tasks train on different prompts; without a penalty, each vector damages the other task."""
    model = kp.load_model(f"lm:{folder}")
    ends = {"moves": "the green field", "sleeps": "nobody sleeps maybe"}
    tasks = {
        verb: write_completions(
            tmp_path / verb, [{"prompt": f"{NOUNS[k % 6]} {verb}", "completion": f" {end}"} for k in range(12)]
        )
        for verb, end in ends.items()
    }
    bundles = {name: kp.estimate_task(model, task, examples=12, samples=4, metric="kl") for name, task in tasks.items()}
    perplexities = {}
    for strength in (None, 3.0):
        vectors = []
        for name, task in tasks.items():
            others = [bundle for other, bundle in bundles.items() if other != name] if strength else []
            vectors.append(kp.train(model, task, reg=others, strength=strength, steps=40, batch_size=12))
        total = kp.add(vectors)
        perplexities[strength] = [kp.evaluate(model, task, vector=total).perplexity for task in tasks.values()]
    assert all(with_it < without for with_it, without in zip(perplexities[3.0], perplexities[None], strict=True))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_saved_model_is_loaded_by_transformers(kind, tmp_path):
    make_torchvision_importable()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = kp.load_model(f"lm:{write_lm(tmp_path / 'base', kind)}")
    task = write_completions(tmp_path / "run", completions("runs"))
    vector = kp.train(model, task, regime="full", steps=2, batch_size=4, lr=1e-2)
    with vector.applied(model.module):
        model.checkpoint.save(tmp_path / "edited")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "edited")
    state = loaded.state_dict()
    for name, parameter in model.module.named_parameters():
        torch.testing.assert_close(state[name], parameter + vector[name] if name in vector else parameter)
    assert AutoTokenizer.from_pretrained(tmp_path / "edited").eos_token == "<|end|>"
    edited, expected = kp.load_model(f"lm:{tmp_path / 'edited'}"), kp.evaluate(model, task, vector=vector)
    assert kp.evaluate(edited, task).log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-4)


COMPLETION_PLAN = """\
name: completions
model: {{name: "lm:{model}"}}
tasks:
  - {{name: moves, data: {data}/moves}}
  - {{name: sleeps, data: {data}/sleeps}}
curvature: {{examples: 8, metric: kl}}
training: {{steps: 2, batch_size: 8, lr: 1.0e-3}}
arms:
  without: {{penalty: none}}
  kfac: {{penalty: kronecker, strength: 3}}
evaluation:
  alphas: "0,1"
  localisation: {{examples: 4}}
"""


@pytest.mark.filterwarnings("ignore::kfacpack.training.metrics.PenaltyWarning")
def test_plans_with_completions_report_perplexities(folder, tmp_path):
    tasks = {verb: write_completions(tmp_path / verb, completions(verb)) for verb in ("moves", "sleeps")}
    (tmp_path / "plan.yaml").write_text(COMPLETION_PLAN.format(model=folder, data=tmp_path))
    results = kp.run(tmp_path / "plan.yaml", tmp_path / "out")
    model, (plain, _) = kp.load_model(f"lm:{folder}"), results["arms"]
    (seed,) = plain["seeds"]
    total = kp.TaskVector.load(next((tmp_path / "out").glob("*/sum*without*.safetensors")))
    for name, task in tasks.items():
        base, added = kp.evaluate(model, task), kp.evaluate(model, task, vector=total)
        assert results["base"]["tasks"][name]["perplexity"] == pytest.approx(base.perplexity)
        assert seed["added"]["sum"]["tasks"][name]["perplexity"] == pytest.approx(added.perplexity)
        assert seed["added"]["sum"]["tasks"][name]["accuracy"] == pytest.approx(added.accuracy)
        assert seed["individual_perplexity"][name] < base.perplexity
    product = 1.0
    for name in tasks:
        product *= seed["added"]["sum"]["tasks"][name]["perplexity"]
    assert results["summary"][0]["added_perplexity"] == pytest.approx(product**0.5)
    kp.report(tmp_path / "out", tmp_path / "report.html")
    assert "perplexity per token" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("section", ["negation: {control: moves}", "disentanglement: {}"])
def test_measurements_that_compare_classes_are_refused_for_completions(folder, tmp_path, section):
    for verb in ("moves", "sleeps"):
        write_completions(tmp_path / verb, completions(verb))
    text = COMPLETION_PLAN.format(model=folder, data=tmp_path) + f"  {section}\n"
    (tmp_path / "plan.yaml").write_text(text)
    with refused(kp.KfacpackError, section.partition(":")[0], "plan.yaml"):
        kp.run(tmp_path / "plan.yaml", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"prompt": "a dog", "completion": ""}, ("empty completion", "a dog")),
        ({"prompt": "a dog", "completion": " runs" * 200}, ("a dog", "tokens", "at most 95")),
    ],
)
def test_completions_that_cannot_be_scored_are_refused(folder, row, facts):
    model = kp.load_model(f"lm:{folder}")
    with refused(kp.KfacpackError, *facts):
        model.prepare([{"prompt": "nobody", "completion": " sleeps"}, row], "texts")


def test_long_prompts_lose_their_start(folder):
    model = kp.load_model(f"lm:{folder}")
    batch = model.prepare([{"prompt": "a dog runs" * 100, "completion": " nobody"}], "texts")
    short = model.prepare([{"prompt": "nobody", "completion": " nobody"}], "texts")
    assert batch["input_ids"].shape[1] == 96
    assert int(batch["answers"].sum()) == int(short["answers"].sum())


@pytest.mark.parametrize("row", [{"question": "a dog", "answer": "runs"}, {"prompt": "a dog", "completion": 3}])
def test_other_columns_than_prompt_and_completion_are_refused(folder, tmp_path, row):
    task = write_completions(tmp_path / "texts", [row] * 8)
    with refused(kp.KfacpackError, "texts", "'prompt' and 'completion'"):
        kp.evaluate(f"lm:{folder}", task)


def test_columns_with_other_names_are_chosen(folder, tmp_path):
    write_completions(tmp_path / "texts", [{"question": "a dog", "answer": " runs", "id": "7"}] * 8)
    task = kp.load_task("texts", tmp_path / "texts", columns="prompt=question,completion=answer")
    assert kp.evaluate(f"lm:{folder}", task).perplexity > 0
