import pytest

from rematic.cost.polynomial import Envelope, Polynomial
from rematic.cost.profile import ActionProfile, Moving, Returns


def linear(per_token):
    return Polynomial.of({(0, 1): per_token})


def rise(per_token):
    return Envelope((linear(per_token),))


# Two storages, of 10 and of 100 bytes a token; the small one is gone after the first part.
OFFLOAD = ActionProfile(
    kept=linear(1),
    forward=rise(120),
    backward=rise(50),
    gradient=linear(0),
    offered=((linear(10), True), (linear(100), True)),
    returns=(Returns(gone=(), rise=rise(45)), Returns(gone=(0,), rise=rise(50))),
)


@pytest.mark.parametrize(
    ("min_bytes", "kept", "backward", "moved"),
    [
        pytest.param(1000, 100, 5000, 11000, id="both move"),
        pytest.param(2000, 1100, 4500, 10000, id="the small one stays, and is freed in backward"),
        pytest.param(20000, 11100, 4500, 0, id="both stay"),
    ],
)
def test_what_is_too_small_to_move_is_freed_in_backward(min_bytes, kept, backward, moved):
    costs = OFFLOAD.at(1, 100, Moving(min_bytes=min_bytes, prefetches=False))
    assert (costs.kept, costs.backward, costs.moved) == (kept, backward, moved)
