"""One process of a distributed run; ``job`` and ``answers`` come from the test.

``job`` is (settings, overrides, sabotage); sabotage says in which round the process dies or falls silent, how many
seconds late it starts, how many it sleeps after each round, whether it draws its adapter from another seed, and whether
it dies when it is asked to evaluate.
"""

import os
import time
import traceback

import torch

torch.set_num_threads(1)
settings, overrides, sabotage = job  # noqa: F821
try:
    import fs_lowrank

    def on_client(round, client, of):
        if round == sabotage.get("dies_in"):
            os._exit(9)
        if round == sabotage.get("silent_in"):
            time.sleep(1000)

    def on_round(record):
        if record["round"] == sabotage.get("dies_after"):
            os._exit(9)
        time.sleep(sabotage.get("sleeps", 0))

    if sabotage.get("other_start"):
        import fs_lowrank.models.adapters as adapters

        adapters.derive = lambda seed, *purpose: 12345
    if sabotage.get("dies_evaluating"):
        from fs_lowrank.engines.federatedscope.client import LowRankClient

        LowRankClient.callback_funcs_for_evaluate = lambda *_: os._exit(9)
    time.sleep(sabotage.get("late", 0))
    result = fs_lowrank.run(
        fs_lowrank.load_config(settings, overrides),
        "federatedscope",
        resume=sabotage.get("resume", False),
        on_round=on_round,
        on_client=on_client,
    )
    answers.put(("ok", result.history, {n: p.detach().numpy() for n, p in result.model.named_parameters()}))  # noqa: F821
except Exception as error:
    traceback.print_exc()
    answers.put((type(error).__name__, str(error), {}))  # noqa: F821
    raise SystemExit(1 if isinstance(error, fs_lowrank.errors.RunFailed) else 2) from error  # as our command does
