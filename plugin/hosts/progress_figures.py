"""What a progress bar shows of a session."""

from __future__ import annotations

from rematic.byte_sizes import format_bytes
from rematic.session import Session


def progress_figures(session: Session) -> dict[str, str]:
    """Returns the policy in force, and the last step's peak of memory with the budget.

    Nothing before the first step has ended.
    """
    step = session.last_step
    if step is None:
        return {}
    memory = format_bytes(step.peak_bytes)
    if session.budget_bytes is not None:
        memory = f"{memory} of {format_bytes(session.budget_bytes)}"
    return {"policy": session.policy.name, "memory": memory}
