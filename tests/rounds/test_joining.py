"""What the processes of one run must have in common."""

import json
import shutil

import pytest

import fs_lowrank
from fs_lowrank.rounds.joining import objection, proof_of
from fs_lowrank.rounds.site import Site


@pytest.mark.more
def test_what_a_model_and_a_tokenizer_read_belongs_to_what_has_to_be_equal(settings, tmp_path):
    """The weights are the same, and so are the tokens of these texts."""
    model = tmp_path / "model"
    shutil.copytree(settings["model"]["type"].partition("@")[0], model)
    config = fs_lowrank.load_config(settings, {"model.type": f"{model}@transformers", "outdir": str(tmp_path / "run")})
    proof = proof_of(Site(config))
    files = {"config.json": ("layer_norm_eps", 1e-3), "tokenizer_config.json": ("model_max_length", 100)}
    for (file, (key, value)), what in zip(files.items(), ("the configuration of the base model", "the tokenizer")):
        kept = (model / file).read_text()
        (model / file).write_text(json.dumps({**json.loads(kept), key: value}))
        other = proof_of(Site(config))
        (model / file).write_text(kept)
        reason = objection(config, proof, config.decisive(), {}, other)
        assert f"its model is not the server's at the start: {what} differs" in reason
    assert proof_of(Site(config)) == proof
