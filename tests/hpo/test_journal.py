"""The journal of a search: a cut last line, lines changed by hand, a full disk, and Optuna's own backend."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from fs_lowrank import RunFailed, UserError
from hpo import cli
from hpo.journal import Journal
from hpo.storage import open_storage


@pytest.fixture
def journal(tmp_path):
    """A journal with one study of three trials; returns its path."""
    path = tmp_path / "journal.log"
    study = optuna.create_study(study_name="s", storage=open_storage(str(path), create=True))
    study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=3)
    return path


def trials(storage):
    return optuna.load_study(study_name="s", storage=storage).trials


def test_a_last_line_cut_anywhere_is_removed_with_one_message(journal, caplog):
    content = journal.read_bytes()
    last = len(content.splitlines(keepends=True)[-1])
    for length in range(len(content) - last + 1, len(content)):
        journal.write_bytes(content[:length])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(trials(open_storage(str(journal)))) == 3
        assert [r.getMessage() for r in caplog.records] == [
            f"{journal}: the last line was cut off while it was written (a full disk, a power failure), "
            "and has been removed"
        ]
        assert journal.read_bytes() == content[:-last]


def test_a_line_cut_by_a_writer_that_died_is_removed_before_the_next_is_written(journal):
    storage = open_storage(str(journal))
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"worker')
    optuna.load_study(study_name="s", storage=storage).ask()
    assert len(trials(open_storage(str(journal)))) == 4


@pytest.mark.parametrize("line", [1, 2, 5])
def test_damage_is_named_with_file_and_line(journal, line):
    lines = journal.read_bytes().splitlines(keepends=True)
    entry = json.loads(lines[line - 1])
    changed = {**entry, "worker_id": "x"}
    for damaged, message in (
        (b'{"op_code":\n', "this is not a line of a journal"),
        (b"[" * 100_000 + b"\n", "this is not a line of a journal"),
        (b"\xff\xfe\n", "this is not a line of a journal"),
        (json.dumps(changed, separators=(",", ":")).encode() + b"\n", "this is not the line that the search wrote"),
        (b"", "this is not the line that the search wrote"),  # a line was removed, the next took its place
    ):
        journal.write_bytes(b"".join([*lines[: line - 1], damaged, *lines[line:]]))
        with pytest.raises(UserError, match=f"journal.log, line {line}: {message}"):
            open_storage(str(journal))


def test_a_figure_changed_by_hand_is_an_error_of_one_line(journal, capsys):
    text = journal.read_text()
    value = json.loads(next(line for line in text.splitlines() if '"values":[' in line))["values"][0]
    journal.write_text(text.replace(f'"values":[{value}]', '"values":[0.99]'))
    assert cli.main(["status", "--dir", str(journal.parent)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "this is not the line that the search wrote there" in error


def test_a_line_without_checksum_that_does_not_fit_is_named(tmp_path):
    path = tmp_path / "journal.log"
    study = optuna.create_study(storage=optuna.storages.JournalStorage(JournalFileBackend(str(path))))
    study.ask()
    path.write_text(path.read_text().replace('"study_id":0', '"study":0'))
    with pytest.raises(UserError, match="journal.log, line 2: this line does not fit those before it"):
        open_storage(str(path))


def test_a_full_disk_leaves_the_journal_as_it_was(journal, monkeypatch):
    storage, before = open_storage(str(journal)), journal.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match="journal.log cannot be written: No space left on device; make room"):
        optuna.load_study(study_name="s", storage=storage).ask()
    assert journal.read_bytes() == before
    monkeypatch.undo()
    assert optuna.load_study(study_name="s", storage=storage).ask().number == 3


def test_optunas_backend_reads_ours_and_we_read_its(journal):
    theirs = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
    assert [t.values for t in trials(theirs)] == [t.values for t in trials(open_storage(str(journal)))]
    optuna.load_study(study_name="s", storage=theirs).set_user_attr("note", 'with ,"sum":" in it')
    ours = open_storage(str(journal))
    assert optuna.load_study(study_name="s", storage=ours).user_attrs["note"] == 'with ,"sum":" in it'
    optuna.load_study(study_name="s", storage=ours).ask()
    assert len(trials(theirs)) == len(trials(open_storage(str(journal)))) == 4


@pytest.mark.parametrize("call", ["rename", "unlink"])
def test_a_disk_that_fails_while_the_lock_is_released(journal, monkeypatch, call):
    """Once: it is released all the same. Each time: one error that names the file."""
    storage, failing = open_storage(str(journal)), [1]

    def fail(path, *others):
        if ".lock" in str(path) and failing[0]:
            failing[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *others)

    real = getattr(os, call)
    monkeypatch.setattr(os, call, fail)
    optuna.load_study(study_name="s", storage=storage).ask()
    assert not failing[0] and len(trials(storage)) == 4
    if call == "rename":
        failing[0] = 2
        with pytest.raises(RunFailed, match="journal.log cannot be written: Input/output error"):
            optuna.load_study(study_name="s", storage=storage).ask()


def test_a_study_that_was_cut_off_while_it_was_made_is_made_whole(search):
    options, ended, _ = search(trials=1, sampler="random")
    path = options.folder / "journal.log"
    lines = path.read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if b'"op_code":2' in line)
    path.write_bytes(b"".join(lines[:first]))  # the study without its settings, as a full disk leaves it
    _, again, _ = search(trials=1, sampler="random")
    assert ended.how == again.how == "done" and open_storage(str(path)).get_all_studies()


@pytest.mark.timeout(60)
def test_the_lock_of_a_process_that_was_killed_is_broken(tmp_path, monkeypatch):
    """Also in a folder that is named from the current one, as by default."""
    monkeypatch.chdir(tmp_path)
    plain = optuna.storages.journal.JournalFileSymlinkLock
    monkeypatch.setattr(optuna.storages.journal, "JournalFileSymlinkLock", lambda path: plain(path, grace_period=3))
    held = Journal(Path("runs/journal.log"))
    held._lock.acquire()  # and its process is killed
    Journal(Path("runs/journal.log")).append_logs([{"op_code": 0, "worker_id": "one"}])
    assert len(list(Journal(Path("runs/journal.log")).read_logs(0))) == 1
