"""Answers end where the tokenizer ends them and where the base's generation config does."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fs_lowrank.config import load_config
from fs_lowrank.models.build import build_model
from fs_lowrank.models.fingerprints import configuration_fingerprint
from fs_lowrank.testing import small
from fs_lowrank.training.generate import continue_prompts


@pytest.mark.parametrize("own, ends", [(5, [5, 3]), ([5, 3], [5, 3]), (3, 3), (None, [3])])
def test_both_ends_are_taken_and_saved(tmp_path, own, ends):
    base = small.save_causal(tmp_path / "base")
    about = json.loads((base / "generation_config.json").read_text()) | {"eos_token_id": own}
    (base / "generation_config.json").write_text(json.dumps(about))
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    config = load_config({"federate.client_num": 2, "model.type": f"{base}@huggingface_llm"})
    model = build_model(config, None, tokenizer)
    assert model.generation_config.eos_token_id == ends
    model.save_pretrained(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["eos_token_id"] == ends
    # Runs of before can be evaluated and resumed: what decides about them is what the files say.
    assert configuration_fingerprint(model) == configuration_fingerprint(build_model(config, None))


def test_generated_text_ends_at_the_tokenizers_end(tmp_path):
    base = small.save_causal(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(str(base)).eval(), AutoTokenizer.from_pretrained(str(base))
    prompts = [[4, 5]]
    free = continue_prompts(model, tokenizer, prompts, batch_size=1, max_new_tokens=6)[0].split()
    model.generation_config.eos_token_id = 2
    tokenizer.eos_token = free[1]
    cut = continue_prompts(model, tokenizer, prompts, batch_size=1, max_new_tokens=6)[0].split()
    assert len(free) > 2 and cut == free[: free.index(free[1]) + 1]
