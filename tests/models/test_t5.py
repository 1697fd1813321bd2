"""T5, T5 v1.1 and flan-T5: prompts, label words, logits as transformers computes them, and the scale of f."""

from __future__ import annotations

import json
from dataclasses import dataclass
from shutil import copytree

import pytest
import torch
from kit import refused

import kfacpack as kp
from kfacpack._compat import make_torchvision_importable
from kfacpack.models.functional import select_parameters
from kfacpack.models.prompts import CONFIG_KEY, PROMPTS, label_words, prompt_style, prompts
from kfacpack.tasks.task import DataOrigin
from kfacpack.training.optimizer import TrainingSettings
from kfacpack.training.regimes import REGIMES
from kfacpack.training.trainer import Trainer

WORDS = ["a", "dog", "runs", "over", "the", "green", "field", "an", "animal", "moves", "nobody", "sleeps"]
CLASSES = ("entailment", "neutral", "contradiction")


@dataclass
class Pairs:
    seed: int
    source: DataOrigin
    size: int = 12

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(100 * self.seed + index)
        words = [WORDS[k] for k in torch.randint(len(WORDS), (8,), generator=generator)]
        return {"premise": " ".join(words[:5]), "hypothesis": " ".join(words[5:])}

    def label(self, index):
        return index % len(CLASSES)


@dataclass
class PairTask:
    name: str
    seed: int
    classes: tuple[str, ...] = CLASSES
    splits = ("train", "test")
    templates = ()
    source = "random words"
    license = None

    def split(self, name):
        return Pairs(self.seed, DataOrigin("words", name))


@pytest.fixture(scope="session")
def untied_folder(t5_folder, tmp_path_factory):
    """The same shape with an output layer of its own, as T5 v1.1 and flan-T5 have it."""

    from transformers import T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("untied") / "flan-small"
    copytree(t5_folder, folder)
    torch.manual_seed(1)
    size = json.loads((t5_folder / "config.json").read_text())["vocab_size"]
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=size, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **shape)
    )
    model.lm_head.weight = torch.nn.Parameter(torch.randn(size, 16))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("folder", ["t5_folder", "untied_folder"])
def test_logits_of_the_label_words_are_transformers_own(folder, request):
    make_torchvision_importable()
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    folder = request.getfixturevalue(folder)
    model = kp.load_model(f"t5:{folder}", prompts="t5")
    stock = T5ForConditionalGeneration.from_pretrained(folder).eval()
    task = PairTask("mnli", 0)
    split = task.split("train")
    batch = model.prepare([split[n] for n in range(4)], task.name)
    head = kp.head_for(model, task, kind="words")
    with torch.no_grad():
        expected = stock(**batch, decoder_input_ids=torch.zeros((4, 1), dtype=torch.long)).logits[:, 0]
        logits = head.logits(model.forward(**batch))
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(CLASSES))
    torch.testing.assert_close(logits, expected[:, ids], rtol=1e-5, atol=1e-5)


def test_the_output_layer_is_untied_where_it_should_be(t5_folder, untied_folder):
    tied, untied = (kp.load_model(f"t5:{folder}").module for folder in (t5_folder, untied_folder))
    assert tied.lm_head.weight is tied.shared.weight
    assert not torch.equal(untied.lm_head.weight, untied.shared.weight)


def test_the_style_is_a_property_of_the_model(t5_folder, untied_folder, tmp_path):
    plain, flan = kp.load_model(f"t5:{t5_folder}"), kp.load_model(f"t5:{untied_folder}")
    assert "'t5'" in plain.preprocessing
    assert "'flan'" in flan.preprocessing
    assert "'t5'" in kp.load_model(f"t5:{untied_folder}", prompts="t5").preprocessing
    # T5 v1.1 differs from flan-T5 in its name only.
    copytree(untied_folder, tmp_path / "t5-v1_1-small")
    assert "'t5'" in kp.load_model(f"t5:{tmp_path / 't5-v1_1-small'}").preprocessing
    # A saved model keeps its style under any name.
    flan.checkpoint.save(tmp_path / "edited")
    assert json.loads((tmp_path / "edited" / "config.json").read_text())[CONFIG_KEY] == "flan"
    assert "'flan'" in kp.load_model(f"t5:{tmp_path / 'edited'}").preprocessing


@pytest.mark.parametrize(("spec", "style"), [("tiny", "flan"), ("t5", "chat")])
def test_a_style_that_does_not_exist_is_refused(spec, style, t5_folder):
    with refused(kp.KfacpackError, repr(style)):
        kp.load_model(f"t5:{t5_folder}" if spec == "t5" else spec, prompts=style)


@dataclass
class Config:
    kfacpack_prompts: str | None = None


@pytest.mark.parametrize(
    ("default", "recorded", "style"),
    [
        ("t5", None, "t5"),
        ("t5", "flan", "flan"),
        ("flan", "t5", "t5"),
        ("t5", "unknown", "t5"),
        ("flan", "chat", "flan"),
    ],
)
def test_prompt_style(default, recorded, style):
    assert prompt_style(Config(recorded), default, ("t5", "flan")) == style


def test_prompts_of_each_style():
    columns = {"premise": ["one"], "hypothesis": ["two"]}
    assert prompts(columns, "mnli", "t5") == ["mnli hypothesis: two premise: one"]
    (prompt,) = prompts(columns, "mnli@1/2", "flan")
    assert prompt.startswith("Text: one\n\nClaim: two\n\n")
    assert "- inconclusive" in prompt
    # A task without a template, and one with other columns, uses T5's form.
    assert prompts(columns, "mine", "flan") == ["mine premise: one hypothesis: two"]
    assert prompts({"text": ["one"]}, "mnli", "flan") == ["mnli text: one"]
    braces = {"premise": ["{hypothesis}"], "hypothesis": ["{0} {"]}
    assert "{0} {" in prompts(braces, "snli", "flan")[0]


def test_label_words_of_each_style():
    classes = ("entailment", "not_entailment")
    assert label_words(classes, "rte", "t5") == ["entailment", "not entailment"]
    assert label_words(classes, "rte", "flan") == ["true", "false"]
    assert label_words(CLASSES, "snli@2/3", "flan") == ["yes", "it is not possible to tell", "no"]
    assert label_words(("cat_dog",), "mine", "flan") == ["cat dog"]


@pytest.mark.parametrize("style", ["flan", "plain", "chat"])
@pytest.mark.parametrize("name", PROMPTS["flan"])
def test_every_prompt_fits_its_task(name, style):
    """A prompt uses the columns of the published task, answers each of its classes, and lists the answers."""
    from kfacpack.tasks.registry import PUBLISHED

    task = PUBLISHED[name]
    (prompt,) = prompts({column: [f"<{column}>"] for column in task.inputs}, name, style)
    assert all(f"<{column}>" in prompt for column in task.inputs)
    assert len(PROMPTS[style][name].answers) == task.classes
    assert all(word.strip().lower() in prompt.lower() for word in PROMPTS[style][name].answers.values())


@pytest.mark.parametrize("style", ["flan", "plain", "chat"])
def test_no_two_prompts_share_an_answer(style):
    """Tasks with the same label words would change each other's logits."""
    answers = [word for prompt in PROMPTS[style].values() for word in prompt.answers.values()]
    assert len(set(answers)) == len(answers)


@pytest.mark.filterwarnings("ignore::kfacpack.training.metrics.PenaltyWarning")
@pytest.mark.parametrize("constant", [1e-2, 37.0])
def test_a_scaled_final_norm_gives_the_same_vector(constant, untied_folder, tmp_path):
    """The output layer is divided by the constant, so the logits do not change."""
    vectors, scales = [], []
    for factor in (1.0, constant):
        model = kp.load_model(f"t5:{untied_folder}", dtype=torch.float64, prompts="t5")
        with torch.no_grad():
            model.module.decoder.final_layer_norm.weight *= factor
            model.module.lm_head.weight /= factor
        trained = [
            name for name in select_parameters(model.module, None, model.frozen) if "final_layer_norm" not in name
        ]
        split = PairTask("other", 5).split("train")
        batch = model.prepare([split[n] for n in range(len(split))], "other")
        regularizer = kp.Regularizer(kp.estimate(model, [batch], params=trained))
        task = PairTask("mnli", 0)
        head = kp.head_for(model, task, kind="words")
        job = Trainer(
            REGIMES["linear"](model, trained), task, head, TrainingSettings(steps=12, batch_size=4), regularizer
        )
        vectors.append(job.run(tmp_path / f"{factor}.safetensors"))
        scales.append(regularizer.output_scale)
    assert scales[1] == pytest.approx(constant**2 * scales[0], rel=1e-5)
    for name in vectors[0]:
        torch.testing.assert_close(vectors[1][name], vectors[0][name], rtol=1e-3, atol=1e-7)
