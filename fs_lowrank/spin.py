"""How long OpenMP's threads spin for work before they sleep; to be set before torch is loaded."""

from __future__ import annotations

import os

#: rounds of the loop in which a thread waits, of 300,000 by default: 0.95, 0.82 and 0.72 of the seconds beside 0, 1 and
#: 2 busy processes (``results/speed/busy.json``)
ROUNDS = 10_000


def bound_spin() -> None:
    """Bound the spinning of this process and of its children, unless the user has said how threads wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(ROUNDS))
