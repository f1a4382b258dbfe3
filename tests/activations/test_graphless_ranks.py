"""DDP sees one gradient for each parameter of a unit without a graph."""

from __future__ import annotations

from tests.ranks import run_ranks


def test_ddp_on_two_ranks_has_the_gradients_of_plain_ddp() -> None:
    outputs = run_ranks("tests.activations.graphless_ranks", seconds=120)
    assert [output.splitlines()[-1:] for output in outputs] == [["equal"], ["equal"]], outputs
