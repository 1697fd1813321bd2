"""Vectors of checkpoints that stock loops trained: applied again, they return the same weights bit for bit."""

from __future__ import annotations

import copy
import json
from hashlib import sha256

import pytest
import torch
from kit import refused
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from vectors.stock_training import batch_of, finetuned, same_bits, same_weights

import kfacpack as kp
from kfacpack.format.vector_manifest import CheckpointEntry, FileEntry
from kfacpack.vectors.checkpoints import StateDictTensors
from kfacpack.vectors.storage import VectorFile


@pytest.fixture(scope="module", params=["open_clip", "timm", "hf", "t5"])
def spec(request, tiny_clip, bert_folder, t5_folder):
    return {"open_clip": tiny_clip, "timm": "timm:test_vit", "hf": f"hf:{bert_folder}", "t5": f"t5:{t5_folder}"}[
        request.param
    ]


def load(spec: str, dtype: torch.dtype = torch.float32) -> kp.Model:
    return kp.load_model(spec, weights="random" if ":/" not in spec else None, dtype=dtype)


@pytest.fixture(scope="module")
def pair(spec):
    """A base model and a module that a stock loop trained from it."""
    model = load(spec)
    return model, finetuned(model)


def extracted(model, source, **options) -> tuple[kp.TaskVector, list[str]]:
    notes: list[str] = []
    return kp.TaskVector.from_checkpoint(model, source, on_note=notes.append, **options), notes


def test_a_checkpoint_comes_back_bit_for_bit(pair, tmp_path):
    model, tuned = pair
    state = {name: value.clone() for name, value in tuned.state_dict().items()}
    save_file(state, tmp_path / "tuned.safetensors")
    tau, notes = extracted(model, tmp_path / "tuned.safetensors", task="toy")
    assert same_weights(tau.apply(model.module), tuned)
    tau.save(tmp_path / "tau.safetensors")
    read = kp.TaskVector.load(tmp_path / "tau.safetensors")
    assert same_weights(read.apply(model.module), tuned)
    assert (read.tasks, read.regime) == (("toy",), "full")
    assert read.about.function == model.function
    outputs = batch_of(model)
    with torch.no_grad(), read.applied(model.module, model.function):
        assert torch.equal(outputs(model.module), outputs(tuned))
    # The stock loop also trains what kfacpack freezes by default.
    assert any("frozen" in note for note in notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bit_for_bit(spec, dtype, tmp_path):
    wide, half = load(spec), load(spec, dtype)
    tuned = finetuned(wide)
    mixed = copy.deepcopy(half.module)  # transformers keeps some weights of T5 in float32
    mixed.load_state_dict(tuned.state_dict())
    assert same_weights(extracted(half, mixed)[0].apply(half.module), mixed)
    tuned = tuned.to(dtype)
    # The same checkpoint as a difference from the float32 base model.
    save_file({name: value.clone() for name, value in tuned.state_dict().items()}, tmp_path / "half.safetensors")
    tau, notes = extracted(wide, tmp_path / "half.safetensors")
    assert same_weights(tau.apply(wide.module).to(dtype), tuned)
    assert same_weights(tau.apply(wide.module), copy.deepcopy(tuned).float())
    assert any("float32" in note for note in notes)


def test_weights_far_from_the_base_model_come_back_bit_for_bit(pair, tmp_path):
    model, _ = pair
    far = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in far.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator)
                * 10 ** torch.randint(-9, 1, parameter.shape, generator=generator)
            )
            parameter.view(-1)[:1] = -0.0
    tau, notes = extracted(model, far)
    tau.save(tmp_path / "far.safetensors")
    assert any(tau.remainder(name) for name in tau)
    assert same_weights(kp.TaskVector.load(tmp_path / "far.safetensors").apply(model.module), far)
    assert any("fine-tuned from" in note for note in notes)


def test_only_what_differs_takes_space(pair, tmp_path):
    model, tuned = pair
    name = [name for name in extracted(model, tuned)[0] if name.lower().endswith("norm.weight") or "ln_" in name][-1]
    state = {**model.module.state_dict(), name: tuned.state_dict()[name]}
    tau, _ = extracted(model, state)
    assert [n for n in tau if tau.rank(n) != 0] == [name]
    tau.save(tmp_path / "one.safetensors")
    assert {n for n in load_file(tmp_path / "one.safetensors") if "remainder" not in n} == {name}


def test_extracted_vectors_can_be_added(pair):
    model, tuned = pair
    first, _ = extracted(model, tuned, task="one")
    second_state = {name: value.clone() for name, value in model.module.state_dict().items()}
    changed = [name for name in first if name.lower().endswith("norm.weight") or "ln_" in name][-1]
    second_state[changed] += 0.5
    second, _ = extracted(model, second_state, task="two")
    assert len(second) <= len(first)
    for total in (first + second, second + first):
        torch.testing.assert_close(total[changed], first[changed] + second[changed])
        other = next(name for name in first if name != changed and first.rank(name) is None)
        assert torch.equal(total[other], first[other])
        total.apply(model.module)


def test_a_base_model_has_no_vector(pair):
    model, _ = pair
    with refused(kp.TaskVectorError, "all weights equal", model.name):
        extracted(model, model.module)


def test_names_missing_and_unexpected_are_listed(pair, tmp_path):
    model, tuned = pair
    state = {name: value.clone() for name, value in tuned.state_dict().items()}
    default = extracted(model, tuned)[0].parameters
    lost = next(name for name in reversed(default) if "norm" in name.lower() or "ln" in name)
    del state[lost]
    state["adapter.extra"] = torch.ones(3)
    path = tmp_path / "wrong.safetensors"
    save_file(state, path)
    with refused(kp.TaskVectorError, path, f"missing from the checkpoint: 1 ({lost!r})", "'adapter.extra'"):
        extracted(model, path)
    state = {name: value.clone() for name, value in tuned.state_dict().items()}
    state[lost] = torch.ones(3)
    with refused(kp.TaskVectorError, "different shape", repr(lost), "[3]"):
        extracted(model, state)
    state[lost] = tuned.state_dict()[lost].to(torch.int8)
    with refused(kp.TaskVectorError, "float", repr(lost), "I8"):
        extracted(model, state)
    state[lost] = tuned.state_dict()[lost] * float("nan")
    with refused(kp.TaskVectorError, "NaN", repr(lost)):
        extracted(model, state)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.image_encoder."])
def test_wrappers_are_removed_and_reported(pair, prefix):
    model, tuned = pair
    tau, notes = extracted(model, {f"{prefix}{name}": value for name, value in tuned.state_dict().items()})
    assert same_weights(tau.apply(model.module), tuned)
    assert any(prefix in note for note in notes)


def test_two_copies_of_the_weights_are_ambiguous(pair):
    model, tuned = pair
    state = {
        f"{prefix}{name}": value for prefix in ("student.", "teacher.") for name, value in tuned.state_dict().items()
    }
    with refused(kp.TaskVectorError, "'student.'", "'teacher.'"):
        extracted(model, state)


def test_two_names_of_one_parameter_are_ambiguous(bert_folder):
    """Early checkpoints of BERT have `gamma` in place of `weight`; a checkpoint with both is not read at random."""
    model = load(f"hf:{bert_folder}")
    state = dict(model.module.state_dict())
    name = next(name for name in state if name.endswith("LayerNorm.weight"))
    old = f"{name.removesuffix('weight')}gamma"
    with refused(kp.TaskVectorError, old, name):
        extracted(model, {**state, old: state[name] + 1})


def test_other_architectures_are_refused(tiny_clip, bert_folder, t5_folder):
    bert, t5, clip = load(f"hf:{bert_folder}"), load(f"t5:{t5_folder}"), load(tiny_clip)
    for model, other in ((bert, t5), (t5, clip), (clip, bert)):
        with refused(kp.TaskVectorError, "the state dict"):
            extracted(model, other.module)


def test_a_vision_tower_alone(tiny_clip):
    model = load(tiny_clip)
    tuned = finetuned(model).state_dict()
    tower = {name: value for name, value in tuned.items() if name.startswith("visual.")}
    for state in (tower, {name.removeprefix("visual."): value for name, value in tower.items()}):
        tau, notes = extracted(model, state)
        edited = tau.apply(model.module).state_dict()
        assert all(same_bits(edited[name].flatten(), value.flatten()) for name, value in tower.items())
        assert all(name.startswith("visual.") for name in tau)
        assert any("unchanged" in note for note in notes)


def test_heads_of_classifiers_are_left_out(bert_folder, tmp_path):
    from transformers import BertForSequenceClassification

    model = load(f"hf:{bert_folder}")
    torch.manual_seed(2)
    classifier = BertForSequenceClassification.from_pretrained(bert_folder, num_labels=3)
    with torch.no_grad():
        for parameter in classifier.bert.encoder.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    classifier.save_pretrained(tmp_path / "classifier")
    tau, notes = extracted(model, tmp_path / "classifier", task="nli")
    assert same_weights(tau.apply(model.module), classifier.bert)
    assert any("'classifier.weight'" in note for note in notes)
    assert any("'bert.'" in note for note in notes)
    assert all(name.startswith("encoder.") for name in tau if tau.rank(name) != 0)
    # As peft and Trainer write it: in shards, with an index.
    classifier.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    sharded, _ = extracted(model, tmp_path / "shards", task="nli")
    manifests = []
    for vector in (tau, sharded):
        vector.save(tmp_path / "tau.safetensors")
        manifests.append(VectorFile(tmp_path / "tau.safetensors").manifest_json)
        assert len(manifests[-1].pop("checkpoints")) == 1
    assert manifests[0] == manifests[1]  # with the digests of all tensors


def test_a_timm_head_with_other_classes_is_left_out():
    import timm

    model = kp.load_model("timm:test_vit", weights="random")
    torch.manual_seed(3)
    other = timm.create_model("test_vit", num_classes=7)
    state = {**finetuned(model).state_dict(), **{f"head.{k}": v for k, v in other.head.state_dict().items()}}
    tau, notes = extracted(model, state)
    assert "head.weight" not in tau
    assert any("'head.weight'" in note for note in notes)


def test_batch_norm_statistics_are_refused():
    model = kp.load_model("timm:test_resnet", weights="random")
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    state["conv1.weight" if "conv1.weight" in state else next(iter(state))] += 0.1
    assert extracted(model, state)[0].regime == "full"
    buffer = next(name for name in state if name.endswith("running_mean"))
    state[buffer] += 0.1
    with refused(kp.TaskVectorError, repr(buffer), "buffer", "eval()"):
        extracted(model, state)


def test_tied_weights_must_stay_tied(t5_folder):
    model = load(f"t5:{t5_folder}")
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    tied = [name for name in state if name in ("shared.weight", "encoder.embed_tokens.weight", "lm_head.weight")]
    for name in tied:
        state[name] += 0.5
    state["decoder.embed_tokens.weight"] = state["shared.weight"]
    tau, _ = extracted(model, state)
    edited = tau.apply(model.module)
    assert same_bits(edited.lm_head.weight, state["shared.weight"])
    assert edited.lm_head.weight is edited.shared.weight
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with refused(kp.TaskVectorError, "'lm_head.weight'", "tied"):
        extracted(model, state)


def test_bad_files_are_refused(bert_folder, tmp_path):
    model = load(f"hf:{bert_folder}")
    tuned = finetuned(model)
    torch.save(tuned.state_dict(), tmp_path / "tuned.bin")
    for name in ("tuned.bin", "tuned.pt", "tuned.ckpt"):
        (tmp_path / name).write_bytes((tmp_path / "tuned.bin").read_bytes())
        with refused(kp.BundleError, name, "save_file"):
            extracted(model, tmp_path / name)
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes((tmp_path / "tuned.bin").read_bytes())
    with refused(kp.BundleError, "pytorch_model.bin", "save_file"):
        extracted(model, tmp_path / "pickles")
    (tmp_path / "empty").mkdir()
    with refused(kp.BundleError, "model.safetensors"):
        extracted(model, tmp_path / "empty")
    with refused(kp.BundleError, "No such file"):
        extracted(model, tmp_path / "nothing.safetensors")
    tau, _ = extracted(model, tuned)
    tau.save(tmp_path / "tau.safetensors")
    with refused(kp.BundleError, "task vector", "weights of a model"):
        extracted(model, tmp_path / "tau.safetensors")
    with refused(kp.KfacpackError, "int"):
        extracted(model, 3)
    with refused(kp.KfacpackError, "Linear"):
        extracted(torch.nn.Linear(2, 2), tuned)
    with refused(kp.KfacpackError, "task"):
        extracted(model, tuned, task="a\nb")


def test_damaged_shards_are_named(bert_folder, tmp_path):
    model = load(f"hf:{bert_folder}")
    folder = tmp_path / "shards"
    finetuned(model).save_pretrained(folder, max_shard_size="5KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    index = folder / "model.safetensors.index.json"
    content, raw = index.read_text(), shards[1].read_bytes()
    shards[1].write_bytes(raw[:-10])
    with refused(kp.BundleError, shards[1].name, "download it again"):
        extracted(model, folder)
    shards[1].unlink()
    with refused(kp.BundleError, shards[1].name, "missing"):
        extracted(model, folder)
    shards[1].write_bytes(raw)
    entries = json.loads(content)
    entries["weight_map"]["more.weight"] = shards[0].name
    index.write_text(json.dumps(entries))
    with refused(kp.BundleError, "'more.weight'", shards[0].name):
        extracted(model, folder)
    for wrong in ("../x.safetensors", "x.bin", 3):
        index.write_text(json.dumps({"weight_map": {"a": wrong}}))
        with refused(kp.BundleError, "weight_map"):
            extracted(model, folder)
    index.write_text("{")
    with refused(kp.BundleError, "JSON"):
        extracted(model, folder)
    index.write_text(content)
    assert extracted(model, folder)[0]


def test_a_model_may_be_named(tmp_path):
    model = kp.load_model("tiny")
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    state["visual.proj"] += 0.125
    tau = kp.TaskVector.from_checkpoint("tiny", state)
    assert tau.tasks == ()
    assert torch.equal(tau.apply(model.module).state_dict()["visual.proj"], state["visual.proj"])
    tau.save(tmp_path / "tau.safetensors")
    assert "no tasks" not in repr(kp.TaskVector.load(tmp_path / "tau.safetensors"))


def recorded_files(tau: kp.TaskVector) -> dict[str, str]:
    return {file.name: file.sha256 for checkpoint in tau.about.checkpoints for file in checkpoint.files}


def test_the_checkpoint_is_recorded_by_its_name_and_the_digests_of_its_files(bert_folder, tmp_path, monkeypatch):
    model = kp.load_model(f"hf:{bert_folder}")
    tuned = finetuned(model)
    folder = tmp_path / "private" / "shards"
    tuned.save_pretrained(folder, max_shard_size="5KB")
    expected = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    assert len(expected) > 2
    tau, _ = extracted(model, folder)
    assert recorded_files(tau) == expected
    assert [(entry.name, entry.kind, entry.revision) for entry in tau.about.checkpoints] == [
        ("shards", "weights", None)
    ]
    monkeypatch.chdir(folder)
    for place in (".", str(folder) + "/", "../shards"):
        assert extracted(model, place)[0].digest == tau.digest
    tau.save(tmp_path / "tau.safetensors")
    assert kp.TaskVector.load(tmp_path / "tau.safetensors").about == tau.about
    assert b"private" not in (tmp_path / "tau.safetensors").read_bytes()


def test_weights_in_memory_have_no_checkpoint(pair, tmp_path):
    model, tuned = pair
    for source in (tuned, tuned.state_dict()):
        assert extracted(model, source)[0].about.checkpoints == ()


def test_a_file_with_an_unusual_name_is_extracted(pair, tmp_path):
    model, tuned = pair
    path = tmp_path / "a\u200bb.safetensors"  # manifests refuse hidden characters
    save_file({name: value.clone() for name, value in tuned.state_dict().items()}, path)
    tau, _ = extracted(model, path)
    assert same_weights(tau.apply(model.module), tuned)
    assert [file.sha256 for file in tau.about.checkpoints[0].files] == [sha256(path.read_bytes()).hexdigest()]


def test_other_vectors_are_written_as_before(tmp_path):
    """The key is absent without checkpoints, and a dense vector with one is of version 1.1."""
    model = kp.load_model("tiny")
    about = kp.AboutVector(base=model.base(["visual.proj"]), function=model.function, regime="full", tasks=())
    change = {"visual.proj": torch.ones(128, 128)}
    kp.TaskVector(change, about).save(tmp_path / "plain.safetensors")
    entry = CheckpointEntry(name="a", kind="weights", files=(FileEntry(name="a", sha256="0" * 64),))
    kp.TaskVector(change, about.model_copy(update={"checkpoints": (entry,)})).save(tmp_path / "listed.safetensors")
    plain, listed = (VectorFile(tmp_path / f"{name}.safetensors").manifest_json for name in ("plain", "listed"))
    assert "checkpoints" not in plain
    assert plain["version"] == "1.0"
    assert listed == {**plain, "version": "1.1", "checkpoints": listed["checkpoints"]}


@pytest.mark.parametrize(
    "checkpoint",
    [
        {"name": "/home/user/a", "kind": "weights", "files": [{"name": "a", "sha256": "0" * 64}]},
        {"name": "a", "kind": "pickle", "files": [{"name": "a", "sha256": "0" * 64}]},
        {"name": "a", "kind": "weights", "files": []},
        {"name": "a", "kind": "weights", "files": [{"name": "a", "sha256": "0" * 40}]},
        {"name": "hf://owner/a", "kind": "weights", "revision": "main", "files": [{"name": "a", "sha256": "0" * 64}]},
    ],
)
def test_invalid_entries_are_refused(checkpoint):
    with pytest.raises(ValidationError):
        CheckpointEntry.model_validate(checkpoint)


@pytest.mark.parametrize("prefix", ["", "datasets/"])
def test_the_location_of_a_checkpoint_on_the_hub(prefix):
    files = [{"name": "a", "sha256": "0" * 64}]
    name = f"hf://{prefix}owner/repo/folder"
    entry = CheckpointEntry.model_validate({"name": name, "kind": "weights", "revision": "0" * 40, "files": files})
    assert entry.location == f"hf://{prefix}owner/repo@{'0' * 40}/folder"


def test_the_prompt_style_does_not_change_the_vector(t5_folder, tmp_path):
    """Prompts determine inputs and label words; a vector without a head depends on neither."""
    digests = set()
    for style in ("t5", "flan"):
        model = kp.load_model(f"t5:{t5_folder}", prompts=style)
        state = {
            name: value.clone() for name, value in finetuned(kp.load_model(f"t5:{t5_folder}")).state_dict().items()
        }
        digests.add(extracted(model, state, task="nli")[0].digest)
    assert len(digests) == 1


@pytest.mark.parametrize("state", [{3: torch.zeros(2)}, {"weight": [0.0]}], ids=["key", "value"])
def test_a_state_dict_maps_strings_to_tensors(state):
    ((key, value),) = state.items()
    with refused(kp.BundleError, repr(str(key)), type(key).__name__, type(value).__name__):
        StateDictTensors(state)
