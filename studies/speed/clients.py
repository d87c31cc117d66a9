"""Many clients in one process: peak memory and set-up time, each measured in a new process."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import ONE_THREAD, in_a_process, memory_row, row

SETTINGS = {
    "federate": {"method": "fedlora", "client_num": 1000, "total_round_num": 1},
    "data": {"type": "sentiment", "splitter": "iid", "splits": [0.96, 0.0, 0.04]},
    "model": {"type": "minilm@transformers"},
    "llm": {"tok_len": 16, "adapter": {"args": [{"r": 4, "alpha": 8, "modules": ["query", "value"]}]}},
    "dataloader": {"batch_size": 2},
    "train": {"local_update_steps": 1, "optimizer": {"type": "SGD", "lr": 0.05}},
    "eval": {"split": ["test"], "freq": 0, "batch_size": 64},
}
#: bytes that a run may use in addition to the base model and the clients' adapters
ALLOWED = 1.5e9


def peak_bytes() -> int:
    """The peak memory of this process."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, rusage begins with the peak of the parent process
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def measure(settings: dict, train: bool) -> dict:
    """Set up the run and, if ``train``, run it; the peak memory is that of this process."""
    from fs_lowrank import load_config
    from fs_lowrank.algebra import nbytes
    from fs_lowrank.engines.local import LocalEngine

    imported = peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(settings, outdir=folder)
        started = time.process_time()  # with one thread, processor time does not include other load on the machine
        engine = LocalEngine(config)
        measured: dict[str, Any] = {
            "clients": len(engine.site.clients),
            "setup_seconds": time.process_time() - started,
            "base_bytes": sum(
                p.numel() * p.element_size() for n, p in engine.model.named_parameters() if n not in engine.ledger.state
            ),
            "adapter_bytes": nbytes(engine.method.view(engine.ledger.state)),
            "imported_peak_bytes": imported,
            "setup_peak_bytes": peak_bytes(),
        }
        if train:
            started = time.perf_counter()
            result = engine.run()
            measured.update(
                run_seconds=time.perf_counter() - started,
                peak_bytes=peak_bytes(),
                updates_a_round=[len(r["clients"]) for r in result.history],
                aggregation_seconds=[r["seconds"]["aggregation"] for r in result.history],
            )
    return measured


def in_fresh_process(settings: dict, train: bool) -> dict:
    """``measure`` in a new process with one thread."""
    printed = in_a_process("-m", __name__, json.dumps(settings), json.dumps(train), **ONE_THREAD)
    return json.loads(printed.splitlines()[-1])


def with_federate(settings: dict, **keys) -> dict:
    return {**settings, "federate": {**settings["federate"], **keys}}


def run(settings: dict = SETTINGS, few: int = 10, turns: int = 3) -> dict:
    """Measure 1,000 clients: set-up compared with that of a few, a round of all of them, and rounds of some."""
    many = settings["federate"]["client_num"]
    setups: dict[int, list[float]] = {n: [] for n in (few, many)}
    for _ in range(turns):
        for n in setups:
            setups[n].append(in_fresh_process(with_federate(settings, client_num=n), False)["setup_seconds"])
    least = {n: min(taken) for n, taken in setups.items()}
    milliseconds = 1e3 * (least[many] - least[few]) / (many - few)
    everyone = in_fresh_process(settings, True)
    some = in_fresh_process(with_federate(settings, sample_client_num=many // 10, total_round_num=2), True)
    rows = [
        row(
            f"{many:,} clients, MiniLM, rank 4",
            "set-up, milliseconds a client",
            milliseconds,
            f"{least[many]:.2f} s with {many:,}, {least[few]:.2f} s with {few}",
            most=10,
        ),
        memory_row(f"a round of all {many:,}", everyone, ALLOWED),
        memory_row(f"two rounds of {many // 10} of them", some, ALLOWED),
    ]
    return {"threads": 1, "rows": rows, "results": {"setup_seconds": setups, "everyone": everyone, "some": some}}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]), json.loads(sys.argv[2]))))
