import math
import os
import pathlib
import re

import pytest
import yaml

from fs_lowrank.config import check_engine, check_local, load_config
from fs_lowrank.errors import UserError, say_once
from fs_lowrank.methods import create_method, get_method_class, list_methods, requirements
from fs_lowrank.settings import AdapterSpec, parse_overrides


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def make(overrides=None, **keys):
    return load_config({"federate.client_num": 10, "federate.method": "fedlora"}, overrides, **keys)


def refused(*parts):
    """The configuration is refused with a message that contains every part."""
    return pytest.raises(UserError, match="(?s)" + "".join(f"(?=.*{re.escape(p)})" for p in parts))


FILE = """\
use_gpu: False
seed: 3
federate:
  client_num: 3
  method: rolora
data: {root: data/, type: 'tiny.jsonl@llm'}
llm:
  adapter:
    args: [ { adapter_package: peft, adapter_method: lora, r: 4, lora_alpha: 8, modules: [q_proj, v_proj] } ]
model:
  type: 'some/llama@huggingface_llm'
train:
  optimizer:
    type: adamw
    lr: 5e-3
    weight_decay: 0.0
    betas: [0.9, 0.99]
lowrank:
  mix: 0.5
"""


# -- reading -------------------------------------------------------------------------------------------


def test_file(write):
    config = load_config(write(FILE))
    assert config.federate.method == "rolora" and config.federate.total_round_num == 50
    assert config.train.optimizer.type == "AdamW" and config.train.optimizer.lr == 0.005
    assert config.train.optimizer.extra == {"weight_decay": 0.0, "betas": [0.9, 0.99]}
    assert config.adapter == AdapterSpec(r=4, lora_alpha=8, target_modules=("q_proj", "v_proj"))
    assert config.model.task == "CausalLM" and config.llm.adapter.use is True
    assert config.method_params == {"mix": 0.5} and config.lowrank.min_clients == 1


def test_overrides_take_precedence_in_every_spelling(write):
    path = write(FILE)
    for config in (
        load_config(path, **{"train.optimizer.lr": 1, "seed": 4}),
        load_config(path, train__optimizer__lr=1, seed=4),
        load_config(path, train={"optimizer": {"lr": 1.0}}, seed=4),
        load_config(path, {"train.optimizer.lr": 1.0, "seed": 4}),
        load_config(path, ["train.optimizer.lr", "1", "seed", "4"]),
        load_config(path, ["seed", "9"], train__optimizer__lr=1, seed=4),
    ):
        assert (config.train.optimizer.lr, config.seed) == (1.0, 4)
        assert isinstance(config.train.optimizer.lr, float)
        assert config.train.optimizer.extra["betas"] == [0.9, 0.99]


def test_a_mapping_in_place_of_a_file():
    config = load_config({"federate": {"client_num": 2}, "federate.method": "fedlora", "train.optimizer.lr": "1e-3"})
    assert config.train.optimizer.lr == 1e-3
    assert load_config(config, seed=1).seed == 1 and load_config(config) == config
    assert load_config(federate__client_num=2).federate.client_num == 2


def test_parse_overrides():
    values = {
        "5e-3": 0.005,
        "[q, v]": ["q", "v"],
        "True": True,
        "": "",
        "x@y: z @": {"x@y": "z @"},
        "@odd": "@odd",
        "8": 8,
        "1.5E+2": 150.0,
        "-2e6": -2e6,
        "2026-01-01": "2026-01-01",
        "null": None,
        "{alpha: 0.5}": {"alpha": 0.5},
    }
    for text, value in values.items():
        assert parse_overrides(["a", text, "b", "1"]) == {"a": value, "b": 1}
    with refused("'seed'", "no value"):
        parse_overrides(["train.optimizer.lr", "1", "seed"])
    with refused("--seed=1", "`seed VALUE`"):
        parse_overrides(["--seed=1"])
    with refused("data.splits", "not valid YAML"):
        parse_overrides(["data.splits", "[1, 2"])
    with refused("data.args", "not valid YAML"):
        parse_overrides(["data.args", "[" * 2000 + "]" * 2000])
    with refused("overrides = 'seed 1'"):
        make("seed 1")


def test_an_index_in_a_key(write):
    path = write(FILE)
    assert load_config(path, ["llm.adapter.args.0.r", "16"]).adapter.r == 16
    assert make(llm__adapter__args__0__r=2).adapter.r == 2
    assert make(["data.splitter_args.0.alpha", "0.5"]).data.splitter_args == [{"alpha": 0.5}]
    with refused("llm.adapter.args is a list of 1", "not '2'"):
        load_config(path, ["llm.adapter.args.2.r", "16"])
    with refused("unknown key 'seed.x'", "is a value"):
        make({"seed": 1, "seed.x": 2})


def test_the_case_of_a_trainers_name_does_not_matter():
    for engine in ("local", "federatedscope"):
        check_engine(make({"trainer.type": "LLMTrainer"}), engine)
        with refused("trainer.type = 'GraphTrainer'"):
            check_engine(make({"trainer.type": "GraphTrainer"}), engine)


@pytest.mark.parametrize(
    "text, message",
    [
        ("lowrank:\n  1: 2\n", "line 2: unknown key lowrank.1: expected text"),
        ("train:\n  off: 2\n", "line 2: unknown key train.False: expected text"),
        ("seed: 1\non: 2\n", "line 2: unknown key True: expected text"),
        ("seed: 1\nseed.x: 2\n", "line 2: unknown key 'seed.x': seed is a value (1), not a section"),
        ("data:\n  splits: [1]\n  splits.3: 0\n", "line 3: data.splits.3: data.splits is a list of 1"),
    ],
)
def test_keys_that_fit_nowhere_are_refused_with_file_and_line(write, text, message):
    path = write(text)
    with refused(f"{path}, {message}"):
        load_config(path)
    with refused("override: unknown key 'seed.x'"):
        make({"seed": 1}, **{"seed.x": 2})


@pytest.mark.parametrize(
    "text, parts",
    [
        ("a: [1,\nb: 2\n", ("line", "column", "invalid YAML")),
        ("hello", ("holds a str: expected sections and keys",)),
        (
            "seed: 1\nfederate:\n  client_num: 3\n  client_num: 4\n",
            ("line 4", "federate.client_num", "twice", "line 3"),
        ),
        ("a: !!python/object:os.system {}\n", ("line 1", "invalid YAML")),
        ("on: 1\n", ("unknown key True",)),
        ("", ("federate.client_num", "set it to the number of clients")),
    ],
)
def test_bad_files(write, text, parts):
    with refused("run.yaml" if text[:2] != "on" else "", *parts):
        load_config(write(text))


@pytest.mark.parametrize(
    "text, reason", [("text,label\ngood: very: good,1\n", "invalid YAML"), ("a,b\n", "holds a str")]
)
def test_a_file_of_data_in_place_of_a_configuration(tmp_path, text, reason):
    path = tmp_path / "reviews.csv"
    path.write_text(text)
    with refused(reason, f"for a file of data, fs-lowrank init {path} writes a configuration"):
        load_config(path)


def test_no_file(tmp_path, write):
    write(FILE)
    with refused("runs.yaml: no such file; did you mean 'run.yaml'?"):
        load_config(tmp_path / "runs.yaml")
    with refused("cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with refused("cannot be read: 'utf-8' codec can't decode byte"):
        load_config(tmp_path / "binary.yaml")


def test_lines_are_named(write):
    for text, parts in {
        FILE.replace("lr: 5e-3", "lr: fast"): ("run.yaml, line 15: ", "train.optimizer.lr = 'fast'", "a number"),
        FILE.replace("  mix: 0.5", "  mixx: 0.5"): ("line 19: ", "'lowrank.mixx'", "did you mean 'mix'"),
        FILE.replace("client_num", "client_nun"): ("line 4: ", "'federate.client_nun'", "'federate.client_num'"),
        FILE.replace("r: 4", "r: 0"): ("line 9: ", "llm.adapter.args.0.r = 0", "at least 1"),
        FILE.replace("rolora", "rollora"): ("line 5: ", "federate.method", "did you mean 'rolora'"),
    }.items():
        with refused(*parts):
            load_config(write(text))
    with refused("override: unknown key 'train.optimiser'"):
        load_config(write(FILE), train__optimiser__lr=1)
    with refused("override: train.optimizer.lr = -1", "above 0"):
        load_config(write(FILE), train__optimizer__lr=-1)
    with refused("override: llm.adapter.args.0.r = 0", "at least 1"):
        load_config(write(FILE), {"llm.adapter.args": [{"r": 0}]})


# -- checking ------------------------------------------------------------------------------------------


def test_internal_keys_are_unknown():
    for key in ("framework", "source", "lowrank.params"):
        with refused("unknown key"):
            make({key: {"a": 1}})


@pytest.mark.parametrize(
    "key, value, parts",
    [
        ("use_gpu", "True", ("True or False",)),
        ("seed", 1.5, ("a whole number",)),
        ("seed", True, ("a whole number",)),
        ("outdir", 3, ("the path of a folder",)),
        ("train.optimizer.lr", True, ("a number",)),
        ("train.optimizer.lr", math.nan, ("a number",)),
        (
            "train.optimizer",
            {"type": "AdamW", "betas": [0.9]},
            ("train.optimizer.betas = [0.9]: expected a list of 2",),
        ),
        (
            "train.optimizer",
            {"type": "SGD", "momentum": "abc"},
            ("train.optimizer.momentum = 'abc': expected a number",),
        ),
        ("train.optimizer", {"type": "SGD", "momentun": 0.9}, ("did you mean 'momentum'",)),
        ("expname", "../../x", ("a folder below outdir",)),
        ("federate", 3, ("a section",)),
        ("federate.client_num", 0, ("number of clients",)),
        ("federate.sample_client_num", 11, ("federate.client_num, which is 10",)),
        ("federate.sample_client_num", 0, ("-1 for all",)),
        ("federate.sample_client_rate", 1.1, ("at most 1",)),
        ("federate.mode", "standalon", ("did you mean 'standalone'",)),
        ("federate.method", None, ("text",)),
        ("data.splits", [0.8, 0.2, 0.1], ("add up to 1",)),
        ("data.splits", [0.8, 0.2], ("three shares",)),
        ("data.splits", "0.8", ("a list of numbers",)),
        ("data.splits", "(0.98,0.01,0.01)", ("a list of numbers", "write [0.98,0.01,0.01]")),
        ("eval.split", ["tset"], ("did you mean 'test'",)),
        ("eval.metrics", "acc", ("a list of any of acc",)),
        ("eval.best_res_update_round_wise_key", "loss", ("val_loss",)),
        ("device", "gpu", ("cpu",)),
        ("device", -2, ("-1 for any",)),
    ],
)
def test_bad_values(key, value, parts):
    with refused(key, *parts):
        make({key: value})


def test_values_that_mean_the_same(write):
    config = make(fedopt__optimizer__type="yogi", train__optimizer__type="sgd", train__optimizer__lr=1)
    assert config.fedopt.optimizer.type == "Yogi" and config.train.optimizer.type == "SGD"
    text = "federate: {client_num: 2, method: FedLoRA}\ntrain:\n  cache_frozen: off\n  cache_frozen_bytes: 4e9\n"
    config = load_config(write(text + "data:\ngrad: {}\nmodel: {task: node}\n"))
    assert config.train.cache_frozen == "off" and config.train.cache_frozen_bytes == 4e9
    assert config.federate.method == "fedlora" and config.grad.grad_clip == -1.0 and config.model.task == ""


def test_the_servers_learning_rate_depends_on_its_type_unless_it_is_given():
    def rate(config):
        again = load_config(config.to_dict())
        assert again == config and again.fingerprint() == config.fingerprint()
        return config.decisive()["fedopt.optimizer.lr"]

    plain = make(fedopt__use=True)
    assert rate(plain) == 1 and rate(plain.replace(fedopt__optimizer__type="Adam")) == 0.01
    assert rate(make(fedopt__use=True, fedopt__optimizer__lr=0.01)) == 0.01
    assert plain.fingerprint() == make(fedopt__use=True, fedopt__optimizer__lr=1.0).fingerprint()
    # without a server optimizer the value is kept, and it is resolved when one is turned on
    assert rate(make()) == 0.01 and make().fingerprint() == make(fedopt__optimizer__lr=0.01).fingerprint()
    assert rate(make().replace(fedopt__use=True)) == 1


@pytest.mark.parametrize(
    "keys, asked",
    [
        ({}, 10),
        ({"sample_client_num": 4}, 4),
        ({"sample_client_rate": 0.25}, 2),
        ({"sample_client_rate": 0.01}, 1),
        ({"sample_client_num": 4, "sample_client_rate": 0.5}, 5),
    ],
)
def test_clients_a_round(keys, asked):
    assert make(federate=keys).sampled_per_round == asked


@pytest.mark.parametrize(
    "keys, device",
    [
        ({}, "cpu"),
        ({"device": 1}, "cpu"),
        ({"use_gpu": True}, "cuda"),
        ({"use_gpu": True, "device": 1}, "cuda:1"),
        ({"use_gpu": True, "device": "cpu"}, "cpu"),
    ],
)
def test_device(keys, device):
    assert make(keys).torch_device == device


def test_dtype():
    assert make().dtype == "float32" and make(train__is_enable_half=True).dtype == "bfloat16"
    assert make(lowrank__dtype="bfloat16").dtype == "bfloat16"


# -- the adapter ---------------------------------------------------------------------------------------


def test_adapter_spellings():
    short = {"rank": 2, "alpha": 3.0, "dropout": 0.1, "modules": "q", "layers": [0, 2], "bias": "none"}
    long = {
        "r": 2,
        "lora_alpha": 3,
        "lora_dropout": 0.1,
        "target_modules": ["q"],
        "layers_to_transform": (0, 2),
        "bias": "none",
        "adapter_method": "LoRA",
        "adapter_package": "peft",
    }
    a, b = make(llm__adapter__args=[short]), make(llm__adapter__args=[long])
    assert a == b and a.adapter == AdapterSpec("lora", 2, 3, 0.1, ("q",), (0, 2), False, {"bias": "none"})
    assert a.llm.adapter.args == [
        {**long, "layers_to_transform": [0, 2], "adapter_method": "lora", "use_rslora": False}
    ]
    assert make().adapter == make(llm__adapter__args=[]).adapter == AdapterSpec()
    assert make(llm__adapter__args=[{"layers": 3}]).adapter.layers == (3,)
    assert make(llm__adapter__args=[{"some_new_argument": 3}]).adapter.extra == {"some_new_argument": 3}


def test_what_peft_saves_of_an_adapter_is_taken(caplog):
    for kind, method in (("LORA", "lora"), ("IA3", "ia3")):
        make(llm__adapter__args=[{"adapter_method": method, "peft_type": kind, "task_type": "CAUSAL_LM"}])
    config = make(federate__method="fedlora", llm__adapter__args=[{"alpha": 8, "peft_type": "LORA", "task_type": "X"}])
    check_local(config)
    assert "llm.adapter.args.0.task_type = 'X' has no effect: PEFT sets it itself" in caplog.text


@pytest.mark.parametrize(
    "args, said",
    [
        ([], "lora_alpha is not given: 16 here, 8 in PEFT and FederatedScope"),
        ([{"adapter_method": "LoHa"}], "lora_alpha is not given: 16 here, 8 in PEFT"),
        ([{"adapter_method": "vera"}], "r is not given: 8 here, 256 in PEFT"),
        ([{"adapter_method": "oft"}], "r is not given: 8 here, blocks of 32 (oft_block_size) in PEFT"),
        ([{"adapter_method": "oft", "oft_block_size": 4}], ""),
        ([{"alpha": 16}], ""),
        ([{"adapter_method": "ia3"}], ""),
    ],
)
def test_a_default_that_is_not_pefts_is_said(args, said, caplog):
    """Also of a changed copy; not where no adapter is used, nor of the resolved file, where it is given."""
    config = make(federate__method="fedlora", llm__adapter__args=args)
    for each in (config, config.replace(seed=3), config.replace({"federate.method": "fedavg"}), make(config.to_dict())):
        say_once.cache_clear()
        caplog.clear()
        check_local(each)
        expected = said if each.llm.adapter.use and each.source.defaulted else ""
        assert ("is not given" in caplog.text) == bool(expected) and expected in caplog.text
    assert bool(config.replace(seed=3).source.defaulted) == bool(said) and not make(config.to_dict()).source.defaulted


def test_scale():
    spec = AdapterSpec(r=4, lora_alpha=8)
    assert spec.scale() == 2 and spec.scale(2) == 4
    assert AdapterSpec(r=4, lora_alpha=8, use_rslora=True).scale() == 4


@pytest.mark.parametrize(
    "args, parts",
    [
        ({"r": 0}, ("args.0.r = 0", "at least 1")),
        ({"r": 2.0}, ("a whole number",)),
        ({"alpha": 0}, ("args.0.alpha = 0", "above 0")),
        ({"dropout": 1}, ("below 1",)),
        ({"modules": ["q"], "target_modules": ["v"]}, ("two spellings",)),
        ({"modules": []}, ("empty list",)),
        ({"layers": [-1]}, ("at least 0",)),
        ({"layers": ["a"]}, ("whole numbers",)),
        ({"adapter_method": "lorra"}, ("did you mean 'lora'",)),
        ({"adapter_package": "other"}, ("one of peft",)),
        ({"use_rslora": "yes"}, ("True or False",)),
        *(
            ({"adapter_method": kind, "use_rslora": True}, ("use_rslora", f"is LoRA's, and adapter_method is {kind}"))
            for kind in ("loha", "lokr", "ia3", "oft", "vera")
        ),
    ],
)
def test_bad_adapters(args, parts):
    with refused(*parts):
        make(llm__adapter__args=[args])
    with refused("a list of one mapping"):
        make(llm__adapter__args=[{}, {}])


# -- the method ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, use, args, resolved, used",
    [
        (None, None, [{}], "fedavg", False),
        (None, True, [{"r": 2}], "fedlora", True),
        (None, False, [{"r": 2}], "fedavg", False),
        ("FedAvg", True, [{}], "fedlora", True),
        ("FedAvg", None, [{"r": 2}], "fedavg", False),
        ("fedlora", None, [{}], "fedlora", True),
        ("FedIT", True, [{}], "fedlora", True),
        ("RoLoRA", None, [{}], "rolora", True),
    ],
)
def test_the_frameworks_method_names(method, use, args, resolved, used):
    tree = {"federate": {"client_num": 2}, "llm": {"adapter": {"args": args}}}
    if method:
        tree["federate"]["method"] = method
    if use is not None:
        tree["llm"]["adapter"]["use"] = use
    config = load_config(tree)
    assert (config.federate.method, config.llm.adapter.use) == (resolved, used)
    assert load_config(config.to_dict()) == config


@pytest.mark.parametrize(
    "name, said",
    [
        ("Local", "each client alone is the row `local` of `fs-lowrank compare`"),
        ("global", "all data in one place is the row `pooled` of `fs-lowrank compare`"),
        ("fedprox", "it is lowrank.drift fedprox, with an averaging method"),
    ],
)
def test_a_method_of_the_framework_that_is_none_here_says_what_there_is(name, said):
    with refused(f"no method {name!r}; {said}"):
        get_method_class(name)


def test_methods_that_contradict_the_adapter():
    with refused("federate.method is missing", "fedlora"):
        load_config({"federate.client_num": 2, "llm.adapter.args.0.r": 2})
    with refused("llm.adapter.use", "rolora trains adapters", "fedavg"):
        make(federate__method="rolora", llm__adapter__use=False)


def test_method_params():
    config = make(federate__method="flexlora", lowrank={"ranks": [2, 4], "min_clients": 2})
    assert config.method_params == {"ranks": (2, 4), "split": "b"} and config.lowrank.min_clients == 2
    config.method_params["split"] = "sqrt"
    assert config.method_params["split"] == "b"
    for keys, parts in {
        "ranks [2,0]": ("lowrank.ranks = [2, 0]", "at least 1"),
        "ranks 3": ("a list of whole numbers",),
        "split c": ("lowrank.split", "one of b, sqrt"),
        "mix 0.5": ("lowrank.mix", "keys of flexlora: ranks"),
        "min_client 1": ("'min_clients'",),
    }.items():
        key, value = keys.split()
        with refused(*parts):
            make(["federate.method", "flexlora", f"lowrank.{key}", value])
    with refused("lowrank (regmean): scales is empty"):
        make(federate__method="regmean", lowrank__scales=[])
    with refused(
        "unknown key 'lowrank.tau', which is of fedloru, mfedloru, pfedloru, pmfedloru; keys of fedlora: none"
    ):
        make(lowrank__tau=1)


def test_every_method_is_resolved_and_made():
    for name in list_methods():
        vision = "SequenceClassification" not in requirements(name).tasks
        config = make(federate__method=name, model__type="lenet" if vision else "m@transformers")
        assert config.federate.method == name and load_config(config.to_dict()) == config
        create_method(name, adapter=config.adapter, rounds=2, **config.method_params)
    with refused("did you mean 'rolora'"):
        make(federate__method="rolorra")
    with refused("otfusion': it is not for model.type = m@transformers", "it takes models of ImageClassification"):
        make(federate__method="otfusion", model__type="m@transformers")


def test_methods_that_take_an_adapter_or_all_weights():
    plain, adapted = make(federate__method="fedavg"), make(federate__method="fedlora")
    assert plain.replace(federate__method="fedfisher").llm.adapter.use is False
    other = {"federate__method": "fedfisher", "model__type": "m@transformers"}
    assert adapted.replace(**other).llm.adapter.use is False, "as in a file with this method: nobody asked for one"
    given = make(federate__method="fedlora", llm__adapter__use=True)
    for config in (
        given,
        given.replace(seed=3),
        given.replace(federate__method="fedavg"),
        adapted.replace(given.to_dict()),
    ):
        assert config.replace(**other).llm.adapter.use is True
    assert given.replace(**other, llm__adapter__use=False).llm.adapter.use is False
    asked = make(federate__method="fedfisher", model__type="m@transformers", llm__adapter__use=True)
    assert asked.llm.adapter.use is True and load_config(asked.to_dict()) == asked
    assert make(federate__method="fedfisher", model__type="m@transformers").llm.adapter.use is False


# -- the framework's keys --------------------------------------------------------------------------------


def test_the_frameworks_other_keys(write, caplog):
    config = load_config(
        write(
            FILE + "fedprox: {use: False, mu: 0.3}\n"
            "trainer: {type: llmtrainer, disp_freq: 7}\ncriterion: {type: CrossEntropyLoss}\n"
            "federate.save_to: x.ckpt\n"
            "finetune: {optimizer: {momentum: 0.9}}\nasyn:\nhpo: {sha: {budgets: [1]}}\n"
        )
    )
    assert config.framework["fedprox.mu"] == 0.3 and "fedprox.use" not in config.framework
    say_once.cache_clear()
    check_local(config)
    assert "fedprox.mu = 0.3 has no effect: fedprox.use is False" in caplog.text
    assert "trainer.disp_freq = 7 has no effect: only FederatedScope uses it" in caplog.text
    assert "federate.save_to = 'x.ckpt' has no effect: only FederatedScope uses it" in caplog.text
    assert config.fingerprint() == load_config(write(FILE)).fingerprint()
    assert config.get("fedprox.mu") == 0.3 and config.get("fedprox.use") is False


def test_what_the_framework_says_otherwise_is_taken(caplog):
    config = make({"federate.data_weighted_aggr": True, "model.out_channels": 2, "eval.metrics": ["acc", "correct"]})
    assert config.fingerprint() == make().fingerprint()
    check_local(config)
    for said in (
        "federate.data_weighted_aggr = True has no effect: only FederatedScope uses it",
        "model.out_channels = 2 has no effect: only FederatedScope uses it",
        "eval.metrics: correct has no effect: acc is that number as a share of the samples",
    ):
        assert said in caplog.text


@pytest.mark.parametrize("key, value", [("batch_size", 4), ("shuffle", False), ("drop_last", True)])
def test_the_frameworks_older_spelling_is_named(key, value):
    with refused(f"data.{key} = {value}", f"take dataloader.{key} in place of it"):
        check_local(make({f"data.{key}": value}))


def test_keys_of_the_framework_are_refused_by_the_local_engine(write):
    config = load_config(
        write(
            FILE + "fedprox:\n  use: True\n  mu: 0.3\nasyn.use: True\nfederate.use_ss: True\n"
            "llm.offsite_tuning: {emu_align: {use: True, restore_from: x}}\n"
        ),
        federate__mode="distributed",
        model__hidden=64,
    )
    with pytest.raises(UserError) as caught:
        check_local(config)
    for part in (
        "engine='federatedscope' honours it",
        "fedprox.use = True (line 21)",
        "asyn.use = True",
        "federate.mode = 'distributed'",
        "model.hidden = 64",
        "federate.use_ss = True",
    ):
        assert part in str(caught.value)
    for part in ("emu_align", "fedprox.mu"):  # off, or on with a key that is named
        assert part not in str(caught.value)


@pytest.mark.federatedscope
def test_the_frameworks_own_files():
    files = sorted(pathlib.Path(os.environ["FEDERATEDSCOPE_ROOT"], "federatedscope/llm/baseline").rglob("*.yaml"))
    assert files
    local = 0
    for path in files:
        raw, config = yaml.safe_load(path.read_text()), load_config(path)
        adapter = raw["llm"].get("adapter", {}).get("use", False)
        assert config.federate.method == ("fedlora" if adapter else "fedavg"), path
        assert config.model.task == "CausalLM"
        assert load_config(config.to_dict()) == config, path
        only_there = (
            raw["federate"]["mode"] == "distributed" or raw["llm"].get("offsite_tuning") or raw["llm"].get("deepspeed")
        )
        if only_there:
            with pytest.raises(UserError):
                check_local(config)
        else:
            check_local(config)
            local += 1
    assert local > 50


# -- writing and changing ------------------------------------------------------------------------------


def test_round_trip(write, tmp_path):
    config = load_config(
        write(FILE + "fedprox: {use: True, mu: 1e-7}\n"),
        train__scheduler={"type": "step", "gamma": 1},
        train__cache_frozen="off",
        outdir=pathlib.Path("out"),
        expname="5e-3",
    )
    config.dump(tmp_path / "out.yaml")
    again = load_config(tmp_path / "out.yaml")
    assert again == config and again.to_dict() == config.to_dict() and again.fingerprint() == config.fingerprint()
    assert again.train.cache_frozen == "off" and again.framework["fedprox.mu"] == 1e-7 and again.expname == "5e-3"


def test_numpy_values():
    numpy = pytest.importorskip("numpy")
    config = make(
        {
            "seed": numpy.int64(3),
            "train.optimizer.lr": numpy.float64(0.5),
            "train.optimizer.momentum": numpy.float32(0.5),
        }
    )
    assert type(config.seed) is int and yaml.safe_load(yaml.safe_dump(config.to_dict()))["seed"] == 3


def test_fingerprint():
    config = make()
    assert len(config.fingerprint()) == 12 and int(config.fingerprint(), 16) >= 0
    for key, value in {
        "outdir": "x",
        "expname": "x",
        "verbose": 0,
        "device": 3,
        "train.cache_frozen_dir": "x",
        "federate.save_to": "x",
        "dataloader.num_workers": 2,
        "fedprox.mu": 0.5,
        "lowrank.keep_checkpoints": 5,
    }.items():
        assert config.replace({key: value}).fingerprint() == config.fingerprint(), key
    changed = {
        "seed": 1,
        "train.optimizer.lr": 0.2,
        "train.optimizer.momentum": 0.9,
        "llm.adapter.args.0.r": 2,
        "federate.method": "rolora",
        "fedprox.use": True,
        "federate.ignore_weight": True,
    }
    prints = {config.replace({key: value}).fingerprint() for key, value in changed.items()}
    assert len(prints | {config.fingerprint()}) == len(changed) + 1
    assert (
        make(train__optimizer__weight_decay=0).fingerprint() == make(train__optimizer__weight_decay=0.0).fingerprint()
    )


def test_replace(write):
    config = load_config(write(FILE))
    changed = config.replace(train__optimizer__lr=1.0, **{"federate.client_num": 4})
    assert changed.train.optimizer.lr == 1.0 and changed.federate.client_num == 4
    assert (
        config.train.optimizer.lr == 0.005
        and changed.replace({"train.optimizer.lr": 0.005, "federate.client_num": 3}) == config
    )
    assert config.replace() == config
    assert config.replace(["seed", "5"]).seed == 5
    assert config.replace(model__type="x@transformers").model.task == "SequenceClassification"
    with refused("override: seed = 'x'"):
        config.replace(seed="x")


def test_replace_the_method():
    config = make(federate__method="flexlora", lowrank__ranks=[2, 4])
    other = config.replace(federate__method="fedask").method_params
    assert other["ranks"] == (2, 4) and other["split"] == "sqrt", "b was a default of flexlora, not the user's choice"
    assert config.replace(federate__method="fedlora").method_params == {}
    full = config.replace(federate__method="fedavg")
    assert (full.federate.method, full.llm.adapter.use) == ("fedavg", False)
    assert full.replace(federate__method="rolora").llm.adapter.use is True
    assert config.replace(federate__method="fedavg", llm__adapter__use=True).federate.method == "fedlora"


def test_get():
    config = make(train__optimizer__momentum=0.9)
    assert config.get("train.optimizer.momentum") == 0.9 and config.get("llm.adapter.args.0.r") == 8
    with refused("did you mean 'train.optimizer.lr'"):
        config.get("train.optimizer.lrr")


@pytest.mark.parametrize(
    "key, meant",
    [
        ("federate.metod", "'federate.method'"),
        ("train.optimiser.lr", "'train.optimizer'"),
        ("Seed", "'seed'"),
        ("fedprox.muu", "'fedprox.mu'"),
        ("llm.tok_length", "'llm.tok_len'"),
        ("client_num", "'federate.client_num'"),
        ("train.precision", ""),
        ("train.fp16", ""),
        ("model.name", ""),
        ("data.path", ""),
        ("federate.clients", "'lowrank.clients'"),
        ("train.lr", "'train.optimizer.lr'"),
        ("train.batch_size", "'dataloader.batch_size' or 'eval.batch_size'"),
        ("eval.freqency", "'eval.freq'"),
        ("federat.client_num", "'federate'"),
        ("outputdir", "'outdir'"),
        ("gpu", "'use_gpu'"),
        ("optimizer", "'fedopt.optimizer' or 'train.optimizer'"),
        ("federate.rounds", ""),
        ("train.epochs", ""),
        ("data.pre_transfrom", "'data.pre_transform'"),  # a key of FederatedScope, and ours is data.transform
        ("expname_tags", "'expname_tag'"),
        ("data.split", "'data.splits'"),  # not eval.split
    ],
)
def test_an_unknown_key_names_those_that_are_alike(key, meant):
    with pytest.raises(UserError) as caught:
        load_config({key: 1, "federate.client_num": 2})
    assert str(caught.value).endswith(f"; did you mean {meant}?" if meant else f"'{key}'"), caught.value
