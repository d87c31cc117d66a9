"""A text's score does not depend on the texts beside it, in any family and whatever config.json says of padding."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from fs_lowrank.config import load_config
from fs_lowrank.data.tokenize import tokenize_classification
from fs_lowrank.models.build import build_model
from fs_lowrank.models.given import holding
from fs_lowrank.testing import small
from fs_lowrank.training.evaluate import evaluate
from fs_lowrank.training.generate import continue_prompts
from tests.cases import enlarge, small_config

#: decoders, which read the class at the last token of a text; ``test_families.py`` has all of them, with one padding
DECODERS = ["llama", "bloom", "opt", "mpt"]
#: models that look at the padding of a batch: at its last position, at neighbours, at all positions
LOOKING = ["xlnet", "convbert", "mobilebert", "fnet"]


def saved(folder, kind, pad):
    """A classifier with all weights of such a size that positions differ."""
    small.save_tokenizer(folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(small_config(kind, num_labels=2, pad_token_id=pad))
    enlarge(model, 0.2).save_pretrained(str(folder))
    return folder


def loaded(folder, **keys):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    examples = tokenize_classification(small.make_reviews(24), tokenizer, 24)
    config = load_config({"federate.client_num": 2, "model.type": f"{folder}@transformers", **keys})
    return build_model(config, 2, tokenizer), examples


def check_alone_as_in_a_batch(model, examples):
    assert len(np.unique(examples.lengths)) > 4
    losses = [evaluate(model, examples, size)["loss"] for size in (1, 24)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "llama" else pytest.mark.more) for k in DECODERS])
def test_a_decoder_reads_the_class_at_the_last_token(kind, tmp_path):
    for name, pad in {"as the tokenizer": 0, "another": 5, "beyond": -1, "none": None}.items():
        try:
            folder = saved(tmp_path / name, kind, pad)
        except Exception as error:
            assert pad == -1, error  # the family refuses such a configuration itself
            continue
        model, examples = loaded(folder)
        check_alone_as_in_a_batch(model, examples)
        model.save_pretrained(str(tmp_path / "again"))
        assert AutoConfig.from_pretrained(str(tmp_path / "again")).pad_token_id == 0


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "xlnet" else pytest.mark.more) for k in LOOKING])
def test_a_model_that_looks_at_padding_gets_none(kind, tmp_path):
    model, examples = loaded(saved(tmp_path / "m", kind, 0))
    check_alone_as_in_a_batch(model, examples)
    batch = examples.batch(np.arange(6))
    alone, whole = torch.cat([model(**examples.batch([row])).logits for row in range(6)]), model(**batch)
    torch.testing.assert_close(whole.logits, alone, rtol=1e-4, atol=1e-5)
    losses, trained = (whole.loss, nn.functional.cross_entropy(alone, batch["labels"])), list(model.parameters())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(loss, trained, allow_unused=True) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


class Mean(nn.Module):
    """A module of a program's that forgets the mask."""

    def __init__(self):
        super().__init__()
        self.embedding, self.score = nn.Embedding(40, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask=None):
        return self.score(self.embedding(input_ids).mean(1))


def test_a_module_of_a_programs_own_that_forgets_the_mask(tmp_path, tiny_encoder):
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_encoder))
    examples = tokenize_classification(small.make_reviews(24), tokenizer, 24)
    with holding(Mean(), tokenizer):
        config = load_config(
            {"federate.client_num": 2, "model.type": "Mean@object", "model.task": "SequenceClassification"}
        )
        check_alone_as_in_a_batch(build_model(config, 2, tokenizer), examples)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["rwkv", "bart", "gpt2"])
def test_an_answer_does_not_depend_on_the_prompts_beside_it(kind, tmp_path):
    """RWKV reads padding on the left, and BART's decoder counts it; GPT-2 does neither."""
    small.save_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(small_config(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15]]
    answers = [continue_prompts(model, tokenizer, prompts, batch_size=size, max_new_tokens=6) for size in (1, 3)]
    assert answers[0] == answers[1] and any(answers[0])
