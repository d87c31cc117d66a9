"""Models that ``run`` is given as objects."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import fs_lowrank
from fs_lowrank import RunFailed, UserError
from fs_lowrank.runs.folder import outdir_of
from fs_lowrank.runs.given import with_model
from tests.cases import same_model, save_qwen


class Bag(nn.Module):
    """A mean of embeddings, a hidden layer, and a head."""

    def __init__(self, outputs=2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.hidden = nn.Linear(16, 24)
        self.classifier = nn.Linear(24, outputs)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask.unsqueeze(-1).to(self.embedding.weight.dtype)
        mean = (self.embedding(input_ids) * weights).sum(1) / weights.sum(1)
        return self.head(torch.relu(self.hidden(mean)))

    def head(self, hidden):
        return self.classifier(hidden)


FEW = {"federate.client_num": 3}


@pytest.fixture
def own(few):
    adapter = {"llm.adapter.args": [{"r": 2, "alpha": 4, "modules": ["hidden"]}]}
    return lambda name, keys=None: few(
        name, {"model.type": "", "model.task": "SequenceClassification", **adapter, **(keys or {})}
    )


def same(a, b):
    same_model(a, b)
    assert a.final == b.final


@pytest.mark.more
def test_a_loaded_model_is_what_its_folder_would_be(few, causal_settings, tmp_path_factory):
    folder = save_qwen(tmp_path_factory.mktemp("qwen"))
    from_folder = fs_lowrank.run(few("folder", {"model.type": f"{folder}@huggingface_llm"}, causal_settings))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = few("given", {"model.type": "", "federate.process_num": 2}, causal_settings)
    given = fs_lowrank.run(config, model=model, tokenizer=tokenizer)
    same(from_folder, given)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert (config.outdir, (given.outdir / "given_model" / "config.json").is_file()) == (str(given.outdir), True)


@pytest.mark.more
def test_a_run_with_a_loaded_model_goes_on_with_the_same(few, settings, tiny_encoder):
    model, tokenizer = AutoModel.from_pretrained(tiny_encoder), AutoTokenizer.from_pretrained(tiny_encoder)
    keys = {"model.type": "", "model.task": "SequenceClassification"}
    whole = fs_lowrank.run(few("whole", keys), model=model, tokenizer=tokenizer)
    same(fs_lowrank.run(few("folder", {"model.type": f"{tiny_encoder}@transformers"})), whole)
    config = few("parts", keys)
    fs_lowrank.run(config, model=model, tokenizer=tokenizer, on_round=lambda record: True)
    other = AutoModel.from_pretrained(tiny_encoder)
    other.embeddings.word_embeddings.weight.data += 1
    with pytest.raises(UserError, match="model: not the one of the run in .*parts; continue it with the"):
        fs_lowrank.run(config, model=other, tokenizer=tokenizer, resume=True)
    lower = AutoTokenizer.from_pretrained(tiny_encoder, cls_token="[MASK]")
    with pytest.raises(UserError, match="^tokenizer: not the one of the run"):
        fs_lowrank.run(config, model=model, tokenizer=lower, resume=True)
    model.config.layer_norm_eps *= 2
    with pytest.raises(UserError, match="^model.config: not the one of the run"):
        fs_lowrank.run(config, model=model, tokenizer=tokenizer, resume=True)
    about = whole.outdir.parent / "parts" / "given_model" / "about.json"
    kept = about.read_text()
    for content in (kept[:20], "[" * 100_000):
        about.write_text(content)
        with pytest.raises(UserError, match="about.json cannot be read: .*; start again with overwrite=True"):
            fs_lowrank.run(config, model=model, tokenizer=tokenizer, resume=True)
    about.write_text(kept)
    model.config.layer_norm_eps /= 2
    same(whole, fs_lowrank.run(config, model=model, tokenizer=tokenizer, resume=True))


@pytest.mark.more
def test_a_module_of_ones_own(own, tiny_encoder):
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_encoder), Bag()
    whole = fs_lowrank.run(own("whole", {"federate.method": "rolora"}), model=model, tokenizer=tokenizer)
    assert whole.history[0]["uplink_bytes"] > 0 and not hasattr(model, "peft_config") and type(model) is Bag
    config = own("parts", {"federate.method": "rolora"})
    fs_lowrank.run(config, model=model, tokenizer=tokenizer, on_round=lambda record: True)
    with pytest.raises(
        UserError, match="model.type = Bag@object: a module that a program gave; give it again, with run"
    ):
        fs_lowrank.run(whole.outdir.parent / "parts" / "config.yaml", resume=True)
    same(whole, fs_lowrank.run(config, model=model, tokenizer=tokenizer, resume=True))
    other = Bag()
    other.hidden.weight.data += 1
    with pytest.raises(UserError, match="the model is not what the run in .*parts started with"):
        fs_lowrank.run(config, model=other, tokenizer=tokenizer, resume=True)
    full = fs_lowrank.run(
        own("full", {"federate.method": "fedavg", "llm.adapter.args": [{}]}), model=model, tokenizer=tokenizer
    )
    assert (full.outdir / "model" / "model.safetensors").is_file()
    trained = dict(full.model.named_parameters())["embedding.weight"]
    assert not torch.equal(trained, model.embedding.weight)


class Renamed(Bag):
    """The same, whose head is called otherwise."""

    def __init__(self):
        super().__init__()
        self.last = self.classifier
        del self.classifier

    def head(self, hidden):
        return self.last(hidden)


class Within(Renamed):
    """The same, and its head is inside of another module, with another that is as wide as there are classes."""

    def __init__(self):
        super().__init__()
        self.top = nn.Sequential()
        self.top.last = self.last
        del self.last
        self.norm = nn.LayerNorm(2)
        self.scale = nn.ParameterList([nn.Parameter(torch.tensor(1.0))])

    def head(self, hidden):
        return self.norm(self.top(hidden)) * self.scale[0]


class Colliding(Renamed):
    """The same, whose head is called as parts of PEFT's layers are."""

    def __init__(self):
        super().__init__()
        self.layer = self.last
        del self.last

    def head(self, hidden):
        return self.layer(hidden)


@pytest.fixture
def trains_last(own, tiny_encoder, caplog):
    """Whether a run of one round trains the weight of the last layer, and what it says; nothing of the base trains."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder)

    def run(module, **adapter):
        caplog.clear()
        fs_lowrank.errors.say_once.cache_clear()
        before = {name: tensor.clone() for name, tensor in module.named_parameters()}
        args = {"r": 2, "alpha": 4, "modules": ["hidden"], **adapter}
        keys = {"federate.total_round_num": 1, "llm.adapter.args": [args]}
        result = fs_lowrank.run(own("run", keys), model=module, tokenizer=tokenizer, overwrite=True)
        now = dict(result.model.named_parameters())
        for name in ("embedding.weight", "hidden.base_layer.weight", "hidden.base_layer.bias"):
            assert torch.equal(now[f"base_model.model.{name}"], before[name.replace(".base_layer", "")]), name
        loaded = PeftModel.from_pretrained(type(module)(), result.outdir / "adapter")
        ids = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
        torch.testing.assert_close(loaded.eval()(**ids), result.model.eval()(**ids).logits)
        (first,) = [w for n, w in before.items() if tuple(w.shape) == (2, 24)]
        others = ("original_module", "lora_")
        (last,) = [w for n, w in now.items() if tuple(w.shape) == (2, 24) and not any(part in n for part in others)]
        return not torch.equal(last, first), caplog.text

    return run


@pytest.mark.more
def test_a_head_of_another_name_is_known_by_its_place(trains_last):
    trained, said = trains_last(Renamed())
    assert trained and "its head is last, whose output the logits are" in said
    assert trains_last(Renamed(), modules="all-linear")[0]


@pytest.mark.more
def test_a_head_that_is_nowhere_is_named_or_said_to_stay(trains_last):
    stays = "no head is trained beside the adapter, because no module at its top is called classifier, score, fc"
    trained, said = trains_last(Within())
    assert not trained and stays in said and "Call it classifier" in said
    trained, said = trains_last(Within(), modules_to_save=["top.last"])
    assert trained and stays not in said
    trained, said = trains_last(Colliding())
    assert not trained and stays in said
    trained, said = trains_last(Renamed(), modules=["hidden", "last"])
    assert not trained and stays in said, "an adapter is on it"
    frozen = Renamed()
    frozen.last.requires_grad_(False)
    trained, said = trains_last(frozen)
    assert not trained and stays in said


@pytest.mark.federatedscope
def test_on_the_framework(own, tiny_encoder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder)
    ours = fs_lowrank.run(own("ours"), model=Bag(), tokenizer=tokenizer)
    theirs = fs_lowrank.run(own("theirs"), "federatedscope", model=Bag(), tokenizer=tokenizer)
    same_model(ours, theirs, atol=1e-5)


#: what a method or PEFT adds is known by such names
RESERVED = ("nested", "lora_A", "original_module", "modules_to_save", "x:hidden")


def reserved(name):
    bag = Bag()
    bag.add_module(name, nn.Linear(16, 24))
    return bag


def test_what_cannot_be_used_is_one_line(own, tiny_encoder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder)
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_encoder)
    adapted = get_peft_model(classifier, LoraConfig(target_modules=["query"]))
    cases = [
        (3, tokenizer, {}, "model = int: expected an nn.Module"),
        (adapted, tokenizer, {}, "an adapted model: expected the one without the adapter"),
        (Bag(), None, {}, "tokenizer = NoneType: model=… needs its tokenizer"),
        (Bag(), tokenizer, {"model.task": ""}, "model = Bag: for which task. set model.task to one of CausalLM,"),
        (Bag(), tokenizer, {"model.task": "CausalLM"}, "transformers cannot load it from a folder for CausalLM"),
        (
            Bag(),
            tokenizer,
            {"federate.process_num": 2},
            "other processes cannot have a module that transformers cannot",
        ),
        (Bag(3), tokenizer, {}, r"gives logits of the shape \(1, 3\) for one text, and the data has 2 labels"),
        (nn.Linear(2, 2), tokenizer, {}, "model: Linear, called with input_ids and attention_mask of one text,"),
        *(
            (reserved(name), tokenizer, {}, f"'{name}.weight' has a name that methods and PEFT use")
            for name in RESERVED
        ),
    ]
    for model, its, keys, said in cases:
        with pytest.raises(UserError, match=said) as caught:
            fs_lowrank.run(own("run", keys), model=model, tokenizer=its)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "part, error",
    [
        ("model", SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")),
        ("tokenizer", Exception("No space left on device (os error 28)")),
        ("tokenizer", OSError(28, "No space left on device")),
    ],
    ids=["safetensors", "tokenizers", "the system"],
)
def test_a_model_that_cannot_be_written_is_one_line(few, causal_settings, tmp_path_factory, monkeypatch, part, error):
    folder = save_qwen(tmp_path_factory.mktemp("qwen"))
    given = {"model": AutoModelForCausalLM.from_pretrained(folder), "tokenizer": AutoTokenizer.from_pretrained(folder)}

    def full(*args, **options):
        raise error

    monkeypatch.setattr(given[part], "save_pretrained", full)
    config = few("full", of=causal_settings)
    place = outdir_of(config) / "given_model"
    with pytest.raises(RunFailed, match=f"^{place} cannot be written: .*No space left on device.*; make room, and run"):
        with_model(config, **given, resume=False)
    assert not place.exists() and not [*place.parent.glob(".given*")]
