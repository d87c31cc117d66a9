"""Scorers: lossless parsing of instructions, lm-eval's own tasks on local rows, generated answers, wrong input."""

import csv
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

import fs_lowrank
from benchmark import scorers
from benchmark.intervals import right_rows, rows_of
from benchmark.scorers import commonsense, generate, local_data
from fs_lowrank import cli
from fs_lowrank.data.tokenize import ALPACA_NO_INPUT
from fs_lowrank.errors import UserError
from fs_lowrank.fetch import hub as fetch_hub
from fs_lowrank.finished import load_run
from fs_lowrank.settings.metrics import standard_error
from fs_lowrank.training.generate import continue_prompts

pytestmark = pytest.mark.usefixtures("manager")

#: a folder with real data, laid out as docs/guides/evaluation.md says
REAL = Path(os.environ.get("FS_LOWRANK_EVAL_DATA", ""))

#: task -> rows of (instruction, answer), in the format of LLM-Adapters
ROWS = json.loads(Path(__file__).with_name("instructions.json").read_text(encoding="utf-8"))
ROWS["ARC-Challenge"] = ROWS["ARC-Easy"]


def row(instruction, answer):
    return {"instruction": instruction, "input": "", "output": f"the correct answer is {answer}", "answer": answer}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root with two synthetic rows per task, three MMLU subjects and some rows of SST-2."""
    root = tmp_path_factory.mktemp("data")
    for task, rows in ROWS.items():
        for split in ("test", "train") if task in ("boolq", "ARC-Easy") else ("test",):
            path = commonsense.path(root, task, split)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([row(*r) for r in rows]))
    for split, subjects in (("test", ("anatomy", "marketing", "virology")), ("dev", ("anatomy",))):
        for subject in subjects:
            path = root / "mmlu" / split / f"{subject}_{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                if subject != "marketing":
                    writer.writerow(["question", "choice0", "choice1", "choice2", "choice3", "answer"])
                writer.writerow(["what is it, the tea?", "1", "None", 'a "b"', "day", "2"])
                answer = "D" if subject == "marketing" else "0"
                writer.writerow(["was it bad?\nor good", "tea", "a", "b", "day", answer])
    return root


@pytest.fixture(scope="module")
def tiny(tiny_causal):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_causal),
        LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    return model, AutoTokenizer.from_pretrained(tiny_causal)


# -- the instruction form ----------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.commonsense
@pytest.mark.parametrize("task", sorted(ROWS))
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_real_row_is_parsed_without_loss(task, split):
    """The conversion to lm-eval's fields is lossless: the texts of the prompt contain the whole question."""
    convert = {folder: c for folder, _, c in local_data._COMMONSENSE.values()}[task]
    for original in commonsense.read(REAL, task, split):
        question = commonsense.split_row(task, original)
        fields = convert(question)
        text = {
            "boolq": lambda f: f"{f['question']}?",
            "piqa": lambda f: f["goal"],
            "social_i_qa": lambda f: f"{f['context']} {f['question']}",
            "winogrande": lambda f: f["sentence"],
            "openbookqa": lambda f: f["question_stem"],
        }.get(task, lambda f: f["question"])(fields)
        assert text == question.question


def test_lm_evals_fields():
    def fields(task, convert, i=0):
        return convert(commonsense.split_row(task, row(*ROWS[task][i])))

    assert fields("boolq", local_data._boolq) == {"passage": "", "question": "is tea good", "label": 1}
    assert fields("piqa", local_data._piqa) == {"goal": "tea", "sol1": "walk, the room ", "sol2": "a book", "label": 1}
    assert fields("social_i_qa", local_data._social_i_qa) == {
        "context": "Dr. Tea was sad. It was quiet.",
        "question": "What was it?",
        "answerA": "tea",
        "answerB": "a book",
        "answerC": "day",
        "label": "3",
    }
    assert fields("hellaswag", local_data._hellaswag) == {
        "activity_label": "Tea",
        "ctx_a": "The room was quiet.",
        "ctx_b": "a story",
        "label": "1",
        "endings": ["was bad", "was it", "day", "the tea"],
    }
    assert fields("hellaswag", local_data._hellaswag, 1)["ctx_a"] == "[header] A walk. [step] It."
    assert fields("winogrande", local_data._winogrande)["answer"] == "1"
    arc = fields("ARC-Easy", local_data._arc)
    assert arc["choices"]["text"][4] == "d" and arc["choices"]["label"][4] == arc["answerKey"] == "E"
    book = fields("openbookqa", local_data._openbookqa)
    assert book["question_stem"] == "It was" and book["choices"]["text"] == ["tea", "a b", "day", "c"]
    # What looks like the number of an option may stand in the question.
    assert fields("boolq", local_data._boolq, 1)["label"] == 0
    assert fields("piqa", local_data._piqa, 1) == {
        "goal": "How? Solution1: no",
        "sol1": "tea",
        "sol2": "book",
        "label": 0,
    }
    arc = fields("ARC-Easy", local_data._arc, 1)
    assert arc["question"] == "What was Answer2: day?" and arc["choices"]["text"] == ["tea", "book", "day"]


@pytest.mark.parametrize(
    "task, instruction, answer, message",
    [
        ("boolq", "is tea good?", "true", "not an instruction of boolq"),
        ("boolq", ROWS["boolq"][0][0], "yes", "answer 'yes' is none of the options"),
        ("openbookqa", ROWS["openbookqa"][0][0], "answer5", "answer 'answer5' is none of the options"),
        ("openbookqa", ROWS["openbookqa"][0][0].replace("Answer2", "Answer 2"), "answer1", "openbookqa with 4 options"),
    ],
)
def test_a_row_of_another_form_is_an_error(root, tmp_path, task, instruction, answer, message):
    path = commonsense.path(tmp_path, task, "test")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([row(*ROWS[task][0]), row(instruction, answer)]))
    with pytest.raises(UserError, match=f"row 1: .*{message}"):
        commonsense.questions(tmp_path, task, "test")


def test_the_training_file_is_capped_and_does_not_depend_on_other_tasks(tmp_path):
    def write(task, rows):
        path = commonsense.path(tmp_path, task, "train")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([row(f"{task} {i} tée", "true") for i in range(rows)]))

    write("piqa", 50)
    write("boolq", 3)
    out = tmp_path / "deep" / "train.jsonl"
    assert commonsense.training_file(tmp_path, out, 10, seed=0, tasks=["piqa", "boolq"]) == {"boolq": 3, "piqa": 10}
    first = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["category"] for r in first] == ["boolq"] * 3 + ["piqa"] * 10
    assert set(first[0]) == {"instruction", "input", "output", "category"}
    write("ARC-Easy", 5)
    three = ["boolq", "piqa", "ARC-Easy"]
    commonsense.training_file(tmp_path, out, 10, seed=0, tasks=three)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert again[5:] == first and [r["category"] for r in again[:5]] == ["ARC-Easy"] * 5
    commonsense.training_file(tmp_path, out, 10, seed=1, tasks=three)
    assert [json.loads(line) for line in out.read_text().splitlines()][8:] != first[3:]
    assert commonsense.training_file(tmp_path, out, None, seed=1, tasks=three)["piqa"] == 50
    with pytest.raises(UserError, match="ARC-Challenge: there is no .*train.json.*LLM-Adapters"):
        commonsense.training_file(tmp_path, out, 10, seed=0)


def test_local_mmlu(root):
    found, place = local_data.find(root, "cais/mmlu", "marketing")
    assert place == "mmlu/test/marketing_test.csv" and len(found["dev"]) == 0
    assert found["test"][0] == {
        "question": "what is it, the tea?",
        "subject": "marketing",
        "answer": 2,
        "choices": ["1", "None", 'a "b"', "day"],
    }
    assert found["test"][1]["answer"] == 3
    assert local_data.find(root, "cais/mmlu", "anatomy")[0]["dev"][1]["answer"] == 0
    file = root / "mmlu/test/marketing_test.csv"
    kept = file.read_bytes()
    file.write_bytes(kept[:9] + b"\xff" + kept[9:])
    with pytest.raises(UserError, match="marketing_test.csv cannot be read: .* can't decode byte 0xff"):
        local_data.find(root, "cais/mmlu", "marketing")
    file.write_bytes(kept + b"x" * 200_000 + b",1,2,3,4,A")
    assert local_data.find(root, "cais/mmlu", "marketing") is not None, "a long text is valid"
    file.write_bytes(kept)
    assert local_data.find(root, "nyu-mll/glue", "rte") is None and local_data.find(root, "other/set", None) is None


# -- lm-eval -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch):
    """Fails if a data set is requested from outside the data root."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def refuse(path, name=None, **kwargs):
        asked.append((path, name))
        raise ConnectionError("no hub here")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    return asked


@pytest.mark.more
def test_lm_evals_score_agrees_with_a_direct_computation(tiny, root, no_hub):
    """ARC-Easy by lm-eval's definition is compared with log-likelihoods computed directly from the model."""
    pytest.importorskip("lm_eval")
    model, tokenizer = tiny
    model.train()
    result = scorers.score(model, tokenizer, {"scorer": "lm_eval", "tasks": ["arc_easy", "social_iqa"]}, root)
    assert model.training and not no_hub
    hits = []
    model.eval()
    for original in ROWS["ARC-Easy"]:
        q = commonsense.split_row("ARC-Easy", row(*original))
        prompt = tokenizer(f"Question: {q.question}\nAnswer:")["input_ids"]
        sums = []
        for option in q.options:
            tail = tokenizer(f" {option}")["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tail])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            sums.append(logits[range(len(tail)), tail].sum().item())
        hits.append(max(range(len(sums)), key=sums.__getitem__) == q.right)
    assert result["arc_easy"]["acc"] == sum(hits) / 2 and result["arc_easy"]["majority"] == 0.5
    assert result["arc_easy"]["n"] == 2 and result["arc_easy"]["version"] == 1.0
    assert result["arc_easy"]["data"] == "commonsense/ARC-Easy, instruction form"
    assert set(result["social_iqa"]) >= {"acc", "acc_stderr", "n", "version", "num_fewshot"}


def test_the_hub_is_asked_once_and_then_its_cache_only(tiny, root, monkeypatch):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch_hub, "_failure", lambda endpoint: "it is silent")
    offline = []

    def load_dataset(*_, **__):
        offline.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("no hub here")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for ask in (scorers.check, partial(scorers.score, *tiny)):
        with pytest.raises(UserError, match="rte needs the data set"):
            ask({"scorer": "lm_eval", "tasks": ["rte"]}, root)
    assert offline == [True, True] and not datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(fetch_hub, "_failure", None)
    scorers.check({"scorer": "generate", "tasks": ["boolq"]}, root)


@pytest.mark.more
def test_all_eight_tasks_and_a_prompt_with_examples(tiny, root, no_hub):
    pytest.importorskip("lm_eval")
    tasks = ["boolq", "piqa", "social_iqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa"]
    result = scorers.score(*tiny, {"scorer": "lm_eval", "tasks": tasks}, root)
    assert sorted(result) == sorted(tasks) and all(0 <= r["acc"] <= 1 and r["n"] == 2 for r in result.values())
    assert all(rows_of(r["acc_right"])[1].mean() == r["acc"] for r in result.values())
    always = {"winogrande": 1.0, "openbookqa": 1.0}  # both rows have one right answer
    assert {task: r["majority"] for task, r in result.items()} == {task: always.get(task, 0.5) for task in tasks}
    result = scorers.score(*tiny, {"scorer": "lm_eval", "tasks": ["boolq", "mmlu_anatomy"], "num_fewshot": 1}, root)
    assert {r["num_fewshot"] for r in result.values()} == {1} and not no_hub


@pytest.mark.more
def test_the_majority_of_texts_that_end_alike_is_that_of_the_right_texts_place(tiny, no_hub, tmp_path):
    """WinoGrande's choices are the texts before the gap, and what follows it differs from row to row."""
    pytest.importorskip("lm_eval")
    instruction, _ = ROWS["winogrande"][0]
    ends = (("fell.", 1), ("was bad.", 2), ("went home.", 2), ("was quiet.", 2))
    rows = [row(instruction.replace("was quiet.", end), f"option{answer}") for end, answer in ends]
    path = commonsense.path(tmp_path, "winogrande", "test")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(rows))
    result = scorers.score(*tiny, {"scorer": "lm_eval", "tasks": ["winogrande"]}, tmp_path)
    assert result["winogrande"]["majority"] == 0.75


@pytest.mark.more
def test_a_group_with_a_missing_task_is_an_error(tiny, root, no_hub, tmp_path, manager):
    pytest.importorskip("lm_eval")
    with pytest.raises(
        UserError,
        match=r"mmlu_abstract_algebra needs the data set cais/mmlu/abstract_algebra: there "
        r"is no .*abstract_algebra_test.csv, and no hub gave it \(ConnectionError: no",
    ):
        scorers.check({"scorer": "lm_eval", "tasks": ["mmlu_stem"]}, root)
    subjects = sorted(manager.task_index["mmlu_stem_tasks"].tags)
    (tmp_path / "mmlu" / "test").mkdir(parents=True)
    for i, task in enumerate(subjects):
        rows = [["what?", "a", "b", "tea", "day", "ABCD"[(i + j) % 4]] for j in range(2 + i % 3)]
        with (tmp_path / "mmlu" / "test" / f"{task.removeprefix('mmlu_')}_test.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    result = scorers.score(*tiny, {"scorer": "lm_eval", "tasks": ["mmlu_stem"]}, tmp_path)
    assert result["mmlu_stem"]["tasks"] == subjects
    n = sum(result[t]["n"] for t in subjects)
    assert result["mmlu_stem"]["n"] == n == sum(2 + i % 3 for i in range(len(subjects)))
    mean = sum(result[t]["acc"] * result[t]["n"] for t in subjects) / n
    assert result["mmlu_stem"]["acc"] == pytest.approx(mean) and result["mmlu_stem"]["acc_stderr"] > 0
    # row j of subject i has the right answer i + j; the group's majority is that of all its rows together
    right = [[(i + j) % 4 for j in range(2 + i % 3)] for i in range(len(subjects))]
    assert [result[t]["majority"] for t in subjects] == [1 / len(rows) for rows in right]
    assert result["mmlu_stem"]["majority"] == max(sum(rows.count(a) for rows in right) for a in range(4)) / n


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"scorer": "lm_evl"}, "evaluation.scorer = 'lm_evl': expected one of lm_eval.*did you mean 'lm_eval'"),
        ({"tasks": ["piqa"]}, "with the key 'scorer'"),
        ({"scorer": "generate", "task": ["piqa"]}, "unknown key 'evaluation.task'; did you mean 'tasks'"),
        ({"scorer": "generate", "tasks": "piqa"}, "evaluation.tasks = 'piqa': expected a list of texts"),
        ({"scorer": "generate", "tasks": []}, "evaluation.tasks = .*expected a list of texts that is not empty"),
        (
            {"scorer": "generate", "tasks": ["piqa"], "limit": 1},
            "limit = 1: expected a whole number or nothing, at least 2",
        ),
        ({"scorer": "generate", "tasks": ["piqa"], "template": "alpacca"}, "did you mean 'alpaca'"),
        (
            {"scorer": "generate", "tasks": ["arc_eazy"]},
            "tasks = 'arc_eazy': .*; did you mean 'arc_easy'",
        ),
        ({"scorer": "lm_eval", "tasks": ["arc_eazy"]}, "no task 'arc_eazy'; did you mean 'arc_easy'"),
        ({"scorer": "lm_eval", "tasks": ["piqa"], "num_fewshot": 2}, "piqa with num_fewshot 2 needs examples"),
        ({"scorer": "lm_eval", "tasks": ["humaneval"]}, "runs generated code; for HumanEval"),
        ({"scorer": "lm_eval", "tasks": ["rte"]}, "no local copy of it is known, and no hub"),
        ({"scorer": "humaneval"}, "run_unsafe_code: true, to allow it"),
        ({"scorer": "humaneval", "run_unsafe_code": "yes"}, "run_unsafe_code = 'yes': expected True or False"),
    ],
)
def test_wrong_input_is_reported_before_training(root, no_hub, spec, message):
    if spec.get("scorer") == "lm_eval":
        pytest.importorskip("lm_eval")
    with pytest.raises(UserError, match=message):
        scorers.check(spec, root)


# -- generate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, reply, answer",
    [
        ("boolq", "the correct answer is true", "true"),
        ("boolq", "false, not true", "false"),
        ("boolq", "True", None),
        ("piqa", "the correct answer is solution2.", "solution2"),
        ("piqa", "solution3", None),
        ("ARC-Easy", "answer5", "answer5"),
        ("openbookqa", "answer 1 answer2", "answer2"),
        ("social_i_qa", "", None),
        ("hellaswag", "ending5 ending4", "ending4"),
        ("winogrande", "Option1 option2", "option2"),
    ],
)
def test_the_first_answer_word_counts(task, reply, answer):
    assert generate.parse(task, reply) == answer


@pytest.mark.more
def test_greedy_replies_do_not_depend_on_the_batch(tiny):
    """Replies are compared with a plain loop over argmax, for prompts of unequal lengths."""
    model, tokenizer = tiny
    model.eval()
    texts = ["the film was", "tea", "a quiet room and a story it was", "bad day"]
    prompts = [tokenizer(t)["input_ids"] for t in texts]
    expected = []
    for ids in prompts:
        ids = list(ids)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        expected.append(ids)
    model.get_base_model().generation_config.repetition_penalty = 5.0  # of its own settings, which are not used
    for size in (1, 2, 4):
        got = continue_prompts(model, tokenizer, prompts, batch_size=size, max_new_tokens=6)
        assert got == [tokenizer.decode(e[len(p) :], skip_special_tokens=True) for e, p in zip(expected, prompts)]
    assert model.get_base_model().generation_config.repetition_penalty == 5.0
    model.get_base_model().generation_config.repetition_penalty = 1.0


def test_the_generate_scorer_counts_and_records(tiny, root, monkeypatch):
    result = scorers.score(*tiny, {"scorer": "generate", "tasks": ["boolq", "arc_easy"], "max_new_tokens": 3}, root)
    assert set(result) == {"boolq", "arc_easy"}
    assert result["boolq"] == {
        "acc": 0.0,
        "acc_stderr": standard_error(0, 2),
        "acc_right": right_rows("first 2", [False, False]),
        "unparsed": 1.0,
        "unparsed_stderr": standard_error(1, 2),
        "majority": 0.5,
        "n": 2,
        "template": "alpaca",
        "version": "first answer word, 1",
        "data": "commonsense/boolq/test.json",
        "decoding": "greedy, at most 3 new tokens, batches of 16 padded on the left",
    }
    asked, (_, tokenizer) = [], tiny

    def reply(model, tokenizer, prompts, **options):
        asked.extend(prompts)
        return ["it is true", "true or false"]

    monkeypatch.setattr(generate, "continue_prompts", reply)
    answered = scorers.score(*tiny, {"scorer": "generate", "tasks": ["boolq"]}, root)["boolq"]
    assert asked == [tokenizer(ALPACA_NO_INPUT.format(instruction=text))["input_ids"] for text, _ in ROWS["boolq"]]
    assert (answered["acc"], answered["unparsed"]) == (0.5, 0.0)
    assert answered["acc_right"] == right_rows("first 2", [True, False])


def test_prompts_of_an_encoder_decoder_model_are_those_of_training(tiny, monkeypatch):
    """The instruction as it is, and the end."""
    _, tokenizer = tiny
    rows = [row(*r) for r in ROWS["boolq"]]
    ids = generate.prompts(rows, tokenizer, paired=True)
    assert ids[0] == [*tokenizer(rows[0]["instruction"])["input_ids"], tokenizer.eos_token_id]
    monkeypatch.setattr(tokenizer, "model_max_length", 3)
    with pytest.raises(UserError, match=f"{len(rows)} of {len(rows)} prompts are longer than the model's limit of 3"):
        generate.prompts(rows, tokenizer, paired=True)


@pytest.mark.more
def test_a_finished_run_by_one_command(root, tmp_path, tiny_causal, instructions_jsonl, capsys, no_hub):
    """``evaluate RUN --tasks`` hands on to ``benchmark score``, which scores as the scorer does."""
    pytest.importorskip("lm_eval")
    keys = {"federate.client_num": 2, "federate.method": "fedlora", "federate.total_round_num": 1, "llm.tok_len": 64}
    tiny = {"data.type": str(instructions_jsonl), "model.type": f"{tiny_causal}@huggingface_llm"}
    tiny |= {"llm.adapter.args": [{"r": 2, "modules": ["q_proj"]}], "data.max_dropped": 1.0}
    run = fs_lowrank.run(fs_lowrank.load_config(tiny, keys, outdir=str(tmp_path / "run")))
    command = ["evaluate", str(tmp_path / "run"), "--tasks", "arc_easy,boolq", "--data", str(root), "--limit", "2"]
    assert cli.main([*command, "--json", str(tmp_path / "scores.json")]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "arc_easy" in printed and "acc_norm" in printed
    assert cli.main([*command, "--json"]) == 0
    assert {row["task"] for row in json.loads(capsys.readouterr().out)} == {"arc_easy", "boolq"}
    loaded = load_run(tmp_path / "run")
    spec = {"scorer": "lm_eval", "tasks": ["arc_easy", "boolq"], "limit": 2}
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == json.loads(
        json.dumps(scorers.score(loaded.model, loaded.tokenizer, spec, root))
    )
    assert cli.main(["evaluate", str(run.outdir), "--tasks", "rte", "--data", str(root)]) == 2
    assert "rte needs the data set" in capsys.readouterr().err.replace("\n", " ")
    assert cli.main(["evaluate", str(run.outdir)]) == 2 and "needs a file or --tasks" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run.outdir), "--data", "x.jsonl", "--limit", "2"]) == 2
    assert cli.main([*command, "--text", "x"]) == 2
