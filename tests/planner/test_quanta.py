from benchmarks.planner_problems import stack
from rematic.planner.quanta import hull, quantum_bytes
from tests.planner.problems import option


def test_a_quantum_divides_what_the_most_common_class_keeps():
    problem = stack(126, seed=4)
    kept = [o.kept_bytes for o in problem.units[1]]
    quantum = quantum_bytes(problem.units)
    excess = -(max(kept) - min(kept)) % quantum
    assert excess < 200  # bytes, of a quantum of some 20 MB
    span = sum(max(o.kept_bytes for o in u) - min(o.kept_bytes for o in u) for u in problem.units)
    assert 4000 <= span // quantum <= 17_000


def test_a_few_bytes_are_counted_one_by_one():
    assert quantum_bytes([(option(1000), option(3))] * 3) == 1
    assert quantum_bytes([(option(1000),)]) == 1


def test_mixes_are_made_of_the_corners_of_the_hull():
    options = (option(100, seconds=0), option(60, seconds=3), option(50, seconds=5.5))
    slower = (option(40, seconds=6), option(30, seconds=6), option(10, seconds=10))
    assert hull((*options, *slower)) == [(0, 10), (20, 6), (50, 3), (90, 0)]
