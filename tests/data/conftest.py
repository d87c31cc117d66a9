from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fs_lowrank.settings import Origin, Settings

WORDS = "[PAD] [UNK] [CLS] [SEP] <s> </s> a b c d e f good bad it is fine question answer <|user|> <|bot|>".split()
CHAT = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|bot|>' }} {{ m['content'] }} "
    "{% if m['role'] == 'assistant' %}</s>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|> {% endif %}"
)


def _words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.fixture
def encoder_tokenizer():
    """Each word is a token; pairs are [CLS] a [SEP] b [SEP], with token types."""
    tokenizer = _words()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@pytest.fixture
def causal_tokenizer():
    """Each word is a token; there is no chat template, and every sequence begins with <s>."""
    tokenizer = _words()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture
def chat_tokenizer(causal_tokenizer):
    causal_tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|bot|>"]})
    causal_tokenizer.chat_template = CHAT
    return causal_tokenizer


def make_config(type="x", root="", args=(), splits=(0.8, 0.1, 0.1), splitter="iid", splitter_args=(), subsample=1.0,
                clients=2, tok_len=16, seed=0):  # fmt: skip
    """A configuration that can be changed, with the defaults of all other keys but ``data.max_dropped``."""
    own = {"type": str(type), "root": str(root), "args": list(args), "splits": list(splits), "splitter": splitter,
           "splitter_args": list(splitter_args), "subsample": subsample, "max_dropped": 1.0}  # fmt: skip
    usual = Settings()
    sections = {name: SimpleNamespace(**vars(getattr(usual, name))) for name in ("federate", "llm", "lowrank", "model")}
    made = SimpleNamespace(
        **sections, data=SimpleNamespace(**{**vars(usual.data), **own}), seed=seed, source=Origin(), alone=0,
        client_settings={},
    )  # fmt: skip
    made.federate.client_num, made.llm.tok_len = clients, tok_len
    return made


@pytest.fixture
def config():
    return make_config
