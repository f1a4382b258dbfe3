from rematic.planner.dominance import undominated
from tests.planner.problems import option


def test_an_option_that_another_beats_in_everything_is_left_out():
    options = (
        option(100, 100, 10, seconds=0.0),
        option(50, 100, 60, seconds=1.0),
        option(60, 100, 60, seconds=1.0),  # keeps more than the one before, for nothing
        option(50, 90, 70, seconds=2.0),  # slower, but rises less in forward
    )
    assert undominated(options) == (0, 1, 3)


def test_of_equal_options_the_first_remains():
    assert undominated((option(10), option(10), option(10))) == (0,)
