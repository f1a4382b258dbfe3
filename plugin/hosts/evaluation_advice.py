"""What helps where memory runs out outside of training."""

from __future__ import annotations

import logging

_log = logging.getLogger("rematic")


def advise_on_evaluation(stage: str) -> None:
    """Says what helps where memory ran out in validation, test or prediction."""
    _log.warning(
        "memory ran out in %s, where no gradients are kept and recomputing cannot help: the policy "
        "of the training is left as it is. Take smaller batches there, turn off caches such as "
        "`use_cache`, and keep no outputs of whole batches.",
        stage,
    )
