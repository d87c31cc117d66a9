"""What the processes of one run must have in common."""

import json
import shutil
from types import SimpleNamespace

import pytest

import fs_lowrank
from fs_lowrank.engines.members import Members
from fs_lowrank.rounds.joining import objection, proof_of
from fs_lowrank.rounds.workspace import Workspace


@pytest.mark.more
def test_what_a_model_and_a_tokenizer_read_belongs_to_what_has_to_be_equal(settings, tmp_path):
    """The weights are the same, and so are the tokens of these texts."""
    model = tmp_path / "model"
    shutil.copytree(settings["model"]["type"].partition("@")[0], model)
    config = fs_lowrank.load_config(settings, {"model.type": f"{model}@transformers", "outdir": str(tmp_path / "run")})
    proof = proof_of(Workspace(config))
    files = {"config.json": ("layer_norm_eps", 1e-3), "tokenizer_config.json": ("model_max_length", 100)}
    for (file, (key, value)), what in zip(files.items(), ("the configuration of the base model", "the tokenizer")):
        kept = (model / file).read_text()
        (model / file).write_text(json.dumps({**json.loads(kept), key: value}))
        other = proof_of(Workspace(config))
        (model / file).write_text(kept)
        reason = objection(config, proof, config.decisive(), {}, other)
        assert f"its model is not the server's at the start: {what} differs" in reason
    assert proof_of(Workspace(config)) == proof


def test_what_a_stranger_says_is_cut_in_the_refusal(settings):
    """A client may send megabytes as the name of a tensor, as a revision, or as a key."""
    config, long = fs_lowrank.load_config(settings), "x" * 10**6
    said = {"client": 1, "agreed": "", "config": config.decisive(), "revisions": {}, "proof": {}}
    server = SimpleNamespace(config=config, proof={}, ledger=None, elsewhere="")
    for more in ({"proof": {long: "1"}}, {"revisions": {long: 2}}, {"config": {**config.decisive(), long: 1}}):
        refusal = Members.refusal(server, {**said, **more})
        assert refusal.startswith("client 1: it") and len(refusal) <= 1000
