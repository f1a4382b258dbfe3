"""Small problems without structure, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from rematic.planner import FixedBytes, Option, Problem, Surroundings
from rematic.policy import Action, Keep, Offload, Recompute, RecomputeOffload, Selective

ACTIONS: tuple[Action, ...] = (Keep(), Selective(), Recompute(), RecomputeOffload(), Offload())


def option(kept=0, forward=0, backward=0, gradient=0, seconds=0.0, moved=0, late=0, action=None):
    return Option(
        action=action or Keep(),
        kept_bytes=kept,
        forward_bytes=forward,
        backward_bytes=backward,
        gradient_bytes=gradient,
        seconds=seconds,
        moved_bytes=moved,
        late_bytes=late,
    )


@st.composite
def small_problems(draw, max_units=5, max_options=3, same_gradients=True, late=False):
    """Problems without structure, zero bytes and zero seconds among them."""
    num_bytes = st.integers(0, 1000)
    units = []
    for _ in range(draw(st.integers(1, max_units))):
        gradient = draw(st.integers(-50, 200))
        units.append(
            tuple(
                option(
                    kept=draw(num_bytes),
                    forward=draw(num_bytes),
                    backward=draw(num_bytes),
                    gradient=gradient if same_gradients else draw(st.integers(0, 200)),
                    late=draw(st.integers(-50, 200)) if late else 0,
                    seconds=draw(st.sampled_from([0.0, 0.25, 1.0, 1.5, 2.0, 7.0])),
                    action=ACTIONS[a],
                )
                for a in range(draw(st.integers(1, max_options)))
            )
        )
    around = {
        name: draw(num_bytes)
        for name in ("embedding_forward", "embedding_kept", "head", "head_left", "optimizer")
    }
    return Problem(
        fixed=FixedBytes(weights=draw(num_bytes)),
        around=Surroundings(**around, embedding_gradient=-around["embedding_kept"]),
        units=tuple(units),
    )
