"""Whether a model gives the same results whatever it has computed before.

Clients, rounds, processes and resumed runs compute batches in different orders. Parameters and buffers are those of the
client, but some models change further attributes of themselves while they compute: BigBird's attention is another one
from the first short batch on, and dynamically scaled positions depend on the longest batch so far.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..data import Examples
from ..errors import UserError, say_once
from ..models.kinds import unwrapped
from ..models.machine import input_device, rounding
from ..models.shortcuts.trials import differing, preserving_modes, rows_to_try
from ..seeds import drawing
from .local import label_logits, to_device


@torch.no_grad()
def check_steady(model: nn.Module, examples: Examples) -> None:
    """Refuse a model whose results for a text depend on the texts before it; warn if they depend on its batch.

    Samples of three lengths are computed one by one, the longest first, again, the shortest first, and in one batch.

    Raises:
        UserError: their logits differ, or are not of one token after each.
    """
    rows, device, name = rows_to_try(examples.lengths, 3), input_device(model), type(unwrapped(model)).__name__

    def logits(*rows: int) -> Tensor:
        with drawing(0):
            return label_logits(model, to_device(examples.batch(list(rows)), device))[0].float().nan_to_num()

    with preserving_modes(model):
        model.eval()
        try:
            first = {row: logits(row) for row in rows[::-1]}
            again = {row: logits(row) for row in rows}
            together = logits(*rows)
        except UserError:
            raise
        except Exception:  # of a model that cannot compute these texts, which training will say
            return
    for row in rows:
        # The same is computed again, so nothing is rounded otherwise.
        if first[row].numel() and (wrong := differing("logits", first[row], again[row], 0.0, least=1e-5)):
            raise UserError(
                f"model.type: the results of {name} depend on the texts computed before: {wrong} for a text of "
                f"{examples.lengths[row]} tokens. So a resumed run would give another result; set a smaller "
                "llm.tok_len, or take another model"
            )
    alone = torch.cat([first[row] for row in rows])
    if alone.numel() and (wrong := differing("logits", alone, together, rounding(model), least=1e-3)):
        say_once(
            f"model.type: the results of {name} for a text depend on the texts of its batch: {wrong}; cut texts to a "
            "smaller llm.tok_len, or take batches of one (dataloader.batch_size, eval.batch_size)"
        )
