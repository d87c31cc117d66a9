"""A file of what has ended is damaged at random; the next command names it, or finds out the same."""

import json
import random
import shutil

import pytest
import yaml

from fs_lowrank import cli
from tests.torture import damage
from tests.torture.bench import Bench
from tests.torture.child import fork
from tests.torture.tiny import RUNS, settings

pytestmark = pytest.mark.slow
#: where a damaged file is still one of its kind, and no checksum is compared, a result may be another
SUBTLE = ("_flip", "_zeros", "_append", "_swap")
COMPARED = {"federate.method": "fedlora", "federate.total_round_num": 1}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench") / "bench")


@pytest.fixture(scope="module")
def undamaged():
    """By command and run: the folder of what has ended, and what the command finds out about it."""
    return {}


def told(command, kind, outdir, bench):
    """How the command about ``outdir`` ended, and what it found out."""
    beside, data = outdir.parent, bench.inputs / ("instructions.jsonl" if kind == "causal" else "reviews.csv")
    out = {"evaluate": "scores.json", "predict": f"predicted{data.suffix}", "report": "report.html"}.get(command)
    out = beside / out if out else outdir / "comparison.json"
    out.unlink(missing_ok=True)
    argv = [command, str(outdir)]
    argv += {"evaluate": ["--data", str(data), "--json"], "predict": ["--data", str(data), "--out"]}.get(
        command, ["--out"]
    )
    argv += [str(out)]
    if command == "compare":
        tree = settings(bench.inputs, outdir, **COMPARED, kind=kind)
        (beside / "config.yaml").write_text(yaml.safe_dump(tree))
        argv = ["compare", "--cfg", str(beside / "config.yaml"), "--methods", "fedlora,local,pooled", "--resume"]
    ended = fork(lambda: cli.main(argv), beside / "printed.out")
    if ended.code or not out.is_file():
        return ended, ""
    text = out.read_text().replace(str(outdir), "RUN")
    return ended, text if command != "compare" else {n: of["final"] for n, of in json.loads(text).items()}


def read_by(command, kind, outdir, bench, draw):
    """A group of the files that the command reads."""
    written = damage._files(outdir)
    if command != "compare":  # which goes on from checkpoints
        written = [path for path in written if outdir in (path.parent, path.parent.parent)]
    top = [path for path in written if path.suffix in (".json", ".jsonl", ".yaml", ".npz")]
    if command == "report":
        return [path for path in top if path.parent == outdir]
    weights = [path for path in written if path.suffix == ".safetensors" or "adapter" in path.parent.name]
    return draw.choice([top, top, weights, damage._files(bench.inputs / kind)])


def sealed(command, target, outdir):
    """Whether the command compares the file with a checksum."""
    sums = outdir / "checksums.json"
    if command == "compare" or target == sums or not target.is_relative_to(outdir):
        return False
    return str(target.relative_to(outdir)) in json.loads(sums.read_text())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("command", ["evaluate", "predict", "report", "compare"])
def test_a_command_about_a_damaged_run_names_the_file_or_finds_the_same(bench, undamaged, command, seed):
    draw = random.Random(f"{command} {seed}")
    run = draw.choice(["ffa_lora, merged", "pfedlora", "causal fedlora"])
    kind = RUNS[run].get("kind", "encoder")
    if (command, run) not in undamaged:
        source = bench.reference(run).folder
        if command == "compare":
            source = bench.folder / f"compared {kind}" / "run"
            source.parent.mkdir(exist_ok=True)
            ended, _ = told(command, kind, source, bench)
            assert not ended.code, ended
        with bench.place() as outdir:
            shutil.copytree(source, outdir)
            undamaged[command, run] = source, told(command, kind, outdir, bench)[1]
    source, wanted = undamaged[command, run]
    assert wanted
    with bench.place() as outdir:
        shutil.copytree(source, outdir)
        target, how = draw.choice(read_by(command, kind, outdir, bench, draw)), draw.choice(damage.DAMAGES)
        before, compared = target.read_bytes(), sealed(command, target, outdir)
        try:
            place = how(target, draw, [path for path in sorted(target.parent.iterdir()) if path.is_file()])
            ended, result = told(command, kind, outdir, bench)
        finally:
            damage.put_back(target, before)
        case = f"{run}: {how.__name__} of {target}{place}: {ended}"
        assert not ended.fault, case
        if ended.code:
            names = [target.name, target.parent.name]
            if target.is_relative_to(outdir):
                first = 1 if command == "compare" and target.parent != outdir else 0  # not the method's folder
                names = list(target.relative_to(outdir).parts[first:])
            names += [f"the {part} is not what the run in" for part in ("data", "model", "tokenizer")]
            assert any(name in ended.err for name in names), case
        elif result != wanted:
            assert not compared and (how.__name__ in SUBTLE or target.suffix == ".jsonl"), case
