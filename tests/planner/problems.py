"""Small problems without structure, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from rematic.planner import FixedBytes, Option, Problem, Surroundings
from rematic.policy import Action, Keep, Offload, Recompute, RecomputeOffload, Selective

ACTIONS: tuple[Action, ...] = (Keep(), Selective(), Recompute(), RecomputeOffload(), Offload())


def option(
    kept=0, forward=0, backward=0, gradient=0, seconds=0.0, moved=0, late=0, cast=0, action=None
):
    return Option(
        action=action or Keep(),
        kept_bytes=kept,
        forward_bytes=forward,
        backward_bytes=backward,
        gradient_bytes=gradient,
        seconds=seconds,
        moved_bytes=moved,
        late_bytes=late,
        cast_bytes=cast,
    )


def under_autocast(problem: Problem) -> Problem:
    """Every unit has copies of weights, a third of what the first one keeps, which `keep` saves."""
    copies = problem.units[0][0].kept_bytes // 3
    casts = len(problem.units) * copies
    head = problem.around.head

    def changed(option: Option) -> Option:
        if isinstance(option.action, Keep):
            return replace(
                option,
                kept_bytes=option.kept_bytes + copies,
                forward_bytes=option.forward_bytes + casts,
            )
        return replace(
            option, forward_bytes=option.forward_bytes + casts - copies, cast_bytes=copies
        )

    of_class = {options: tuple(map(changed, options)) for options in set(problem.units)}
    return replace(
        problem,
        around=replace(problem.around, head=head + casts, casts=casts, head_uncast=2 * head),
        units=tuple(of_class[options] for options in problem.units),
    )


@st.composite
def small_problems(
    draw, max_units=5, max_options=3, same_gradients=True, late=False, autocast=False
):
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
                    cast=draw(st.sampled_from([0, 40, 300])) if autocast else 0,
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
    casts = sum(max(option.cast_bytes for option in options) for options in units)
    return Problem(
        fixed=FixedBytes(weights=draw(num_bytes)),
        around=Surroundings(
            **around,
            embedding_gradient=-around["embedding_kept"],
            casts=casts,
            head_uncast=draw(num_bytes) if autocast else None,
        ),
        units=tuple(units),
    )
