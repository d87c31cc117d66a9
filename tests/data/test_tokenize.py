import pandas as pd
import pytest

from fs_lowrank.data.tables import instructions as as_instructions
from fs_lowrank.data.tokenize import (
    ALPACA_NO_INPUT,
    check_vocabulary,
    tokenize_classification,
    tokenize_instructions,
)
from fs_lowrank.errors import UserError, say_once

WORDS = "[PAD] [UNK] [CLS] [SEP] <s> </s> a b c d e f good bad it is fine question answer <|user|> <|bot|>".split()
ID = {word: i for i, word in enumerate(WORDS)}  # as the tokenizers of conftest.py number them


def ids(text):
    return [ID.get(word, 1) for word in text.split()]


def instructions(*rows):
    return pd.DataFrame(rows, columns=["instruction", "input", "output"])


def test_one_sentence_is_cut_to_length(encoder_tokenizer):
    frame = pd.DataFrame({"text": ["a b c d e f", "good"], "label": [1, 0]})
    examples = tokenize_classification(frame, encoder_tokenizer, 5)
    assert [row.tolist() for row in examples.columns["input_ids"]] == [
        ids("[CLS] a b c [SEP]"),
        ids("[CLS] good [SEP]"),
    ]
    assert examples.labels.tolist() == [1, 0] and examples.pad_id == 0


def test_two_sentences_have_token_types(encoder_tokenizer):
    frame = pd.DataFrame({"text": ["a b c d e"], "text_pair": ["good"], "label": [0]})
    examples = tokenize_classification(frame, encoder_tokenizer, 7)
    assert examples.columns["input_ids"][0].tolist() == ids("[CLS] a b c [SEP] good [SEP]")
    assert examples.columns["token_type_ids"][0].tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_no_room_for_text(encoder_tokenizer):
    frame = pd.DataFrame({"text": ["a"], "label": [0]})
    with pytest.raises(UserError, match="no room"):
        tokenize_classification(frame, encoder_tokenizer, 2)


def test_alpaca_prompt_and_answer_only_labels(causal_tokenizer):
    examples, kept = tokenize_instructions(instructions(("is it", "", "it is fine")), causal_tokenizer, 64)
    prompt = [ID["<s>"], *ids(ALPACA_NO_INPUT.format(instruction="is it"))]
    answer = ids("it is fine </s>")
    assert kept.tolist() == [True]
    assert examples.columns["input_ids"][0].tolist() == prompt + answer
    assert examples.columns["labels"][0].tolist() == [-100] * len(prompt) + answer


def test_chat_template_by_hand(chat_tokenizer):
    examples, _ = tokenize_instructions(instructions(("a b", "c", "good")), chat_tokenizer, 64)
    assert examples.columns["input_ids"][0].tolist() == ids("<|user|> a b c <|bot|> good </s>")
    assert examples.columns["labels"][0].tolist() == [-100] * 5 + ids("good </s>")
    alpaca, _ = tokenize_instructions(instructions(("a b", "c", "good")), chat_tokenizer, 64, template="alpaca")
    assert alpaca.lengths[0] > 20


def test_loss_on_all(chat_tokenizer):
    examples, _ = tokenize_instructions(instructions(("a", "", "b")), chat_tokenizer, 64, loss_on="all")
    assert examples.columns["labels"][0].tolist() == examples.columns["input_ids"][0].tolist()


@pytest.mark.parametrize("start", [True, False])
def test_a_template_without_a_prompt_is_plain_text_that_is_learned_whole(causal_tokenizer, start):
    if not start:
        causal_tokenizer.add_bos_token, causal_tokenizer.bos_token = False, None
    table = pd.DataFrame({"text": ["a b c", " ", "d"]})
    frame, _, skipped = as_instructions(table, "t", {"template": "{text}", "output": "text"})
    examples, kept = tokenize_instructions(frame, causal_tokenizer, 64, template="{text}")
    begin, hidden = ([ID["<s>"]], [-100]) if start else ([], [])
    assert skipped == {"empty output": 1} and kept.tolist() == [True, True]
    assert [row.tolist() for row in examples.columns["input_ids"]] == [begin + ids("a b c </s>"), begin + ids("d </s>")]
    assert [row.tolist() for row in examples.columns["labels"]] == [hidden + ids("a b c </s>"), hidden + ids("d </s>")]
    with pytest.raises(UserError, match="there is no text before the answer, for an encoder-decoder"):
        tokenize_instructions(frame, causal_tokenizer, 64, template="{text}", paired=True)


def test_conversation_takes_the_last_answer(chat_tokenizer):
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    frame = pd.DataFrame({"messages": [[{"role": role, "content": content} for role, content in talk]]})
    examples, _ = tokenize_instructions(frame, chat_tokenizer, 64)
    labels = examples.columns["labels"][0]
    assert labels[labels >= 0].tolist() == ids("d </s>")


THINKING = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|> {{ m['content'] }}{% else %} <|bot|> "
    "{{ m['content'].split('it')[-1].strip() + ' </s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} <|bot|> question {% endif %}"
)


@pytest.mark.parametrize("answer, learned", [("question a it good", "question a it good </s>"), ("good", "good </s>")])
def test_what_a_template_opens_an_answer_with_is_there_once(chat_tokenizer, answer, learned, caplog):
    """As templates of reasoning models open an answer with <think>, and leave reasoning out of what was said."""
    say_once.cache_clear()
    chat_tokenizer.chat_template = THINKING
    examples, _ = tokenize_instructions(instructions(("a", "", answer)), chat_tokenizer, 64)
    assert examples.columns["input_ids"][0].tolist() == ids(f"<|user|> a <|bot|> {learned}")
    assert examples.columns["labels"][0].tolist() == [-100] * 3 + ids(learned)
    assert "opens answers with 'question'" in caplog.text


@pytest.mark.parametrize(
    "template, said",
    [
        ("{% if messages[0]['content'] == 'c' %}{{ raise_exception('no c') }}{% endif %}{{ messages }}", "no c"),
        ("{% for m in messages %}{{ m['content'] }}", "TemplateSyntaxError"),
        ({"rag": "{{ messages }}", "tools": "{{ messages }}"}, "no default"),
        (
            "{{ messages | length }}{% for m in messages %} {{ m['content'] }}{% endfor %}",
            "does not begin with the prompt",
        ),
    ],
    ids=["refuses a row", "broken", "no default", "another prompt"],
)
def test_a_chat_template_that_fails_is_the_users(chat_tokenizer, template, said):
    chat_tokenizer.chat_template = template
    rows = instructions(("c", "", "good")).set_axis([6])
    with pytest.raises(UserError, match=f"^row 7: the model's chat template .*{said}.*another template"):
        tokenize_instructions(rows, chat_tokenizer, 64)


def test_truncation_keeps_an_answer_token_or_drops_the_row(chat_tokenizer):
    frame = instructions(("a", "", "b c d"), ("a b c d e", "", "f"))
    examples, kept = tokenize_instructions(frame, chat_tokenizer, 4)
    assert kept.tolist() == [True, False]
    assert examples.columns["input_ids"][0].tolist() == ids("<|user|> a <|bot|> b")
    with pytest.raises(UserError, match=r"all 2 prompts fill tok_len \(or max_len\) 3 without an answer"):
        tokenize_instructions(frame, chat_tokenizer, 3)


def test_unknown_choices(causal_tokenizer):
    frame = instructions(("a", "", "b"))
    with pytest.raises(UserError, match="row 1: the model's chat template .*chat_template is not set"):
        tokenize_instructions(frame, causal_tokenizer, 64, template="chat")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match="chat_template is not set"):
        tokenize_instructions(pd.DataFrame({"messages": [talk]}), causal_tokenizer, 64)


@pytest.mark.parametrize("columns", [("text", "text_pair"), ("instruction", "output"), ("messages",)])
@pytest.mark.parametrize("unknown, outcome", [(5, ""), (6, "said"), (50, "said"), (51, "refused"), (100, "refused")])
def test_unknown_words(encoder_tokenizer, caplog, columns, unknown, outcome):
    say_once.cache_clear()
    texts = ["tapir"] * unknown + ["good"] * (100 - unknown)
    if columns == ("messages",):
        frame = pd.DataFrame({"messages": [[{"role": "user", "content": text}] for text in texts]})
    else:
        frame = pd.DataFrame(dict.fromkeys(columns, texts))
    message = (
        f"does not know {unknown}% of the tokens of the training text; its vocabulary has {len(encoder_tokenizer)}"
    )
    if outcome == "refused":
        with pytest.raises(UserError, match=f"model.type: .* {message}; are its files"):
            check_vocabulary(frame, encoder_tokenizer)
    else:
        check_vocabulary(frame, encoder_tokenizer)
        check_vocabulary(frame, encoder_tokenizer)
        assert caplog.text.count(message) == (outcome == "said")


def test_a_tokenizer_without_an_unknown_token_gives_none_at_all():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(UserError, match="does not know 100%"):
        check_vocabulary(pd.DataFrame({"text": ["good", "bad", " "]}), empty)
    check_vocabulary(pd.DataFrame({"text": ["", " "]}), empty)


def test_a_length_lowered_by_the_tokenizer_is_reported(encoder_tokenizer, caplog):
    say_once.cache_clear()
    encoder_tokenizer.model_max_length = 5
    frame = pd.DataFrame({"text": ["a b c d e f"], "label": [1]})
    for _ in range(2):
        assert len(tokenize_classification(frame, encoder_tokenizer, 9).columns["input_ids"][0]) == 5
    assert caplog.text.count("tok_len (or max_len) = 9 is lowered to 5") == 1
