"""Programs as people write them are as accurate as matmuls that are rounded by hand."""

import os

import people
import pytest
from roundings import backward_pass, needless
from support import seed_of_run, thorough_but

import mpjax

FEW = (6, 21, 22, 27, 36, 39, 194)  # units, streams, maxima, equal layers, experts, keys
PROGRAMS, CHUNK, WALKED = 200, 10, 60
MANY = 20_000  # of `test_many_programs_as_people_write_are_sound`, on request: hours


@pytest.mark.parametrize("seed", thorough_but(FEW, 0, 2, 5))
def test_program_as_people_write_is_sound(seed):
    assert not people.report(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, PROGRAMS, CHUNK))
def test_programs_as_people_write_are_sound(first):
    assert not [*filter(None, map(people.report, range(first, first + CHUNK)))]


@pytest.mark.thorough
@pytest.mark.skipif("PEOPLE" not in os.environ, reason="hours: PEOPLE=1 runs it")
def test_many_programs_as_people_write_are_sound():
    first = seed_of_run() % 10**9
    assert not [*filter(None, map(people.report, range(first, first + MANY)))]


WALKS = [*range(0, WALKED, 5)]


@pytest.mark.parametrize("first", thorough_but(WALKS, *range(3)))
def test_nothing_is_rounded_between_elementwise_operations(first):
    for seed in range(first, first + 5):
        steps = people.generate(seed)
        args = people.arguments(steps, seed)
        half = ("bfloat16", "float16")[seed % 2]
        planned = mpjax.autocast(people.build(steps), f"mixed_{half}")
        program = backward_pass(planned, *args)
        assert not [*needless(program)], (seed, steps)
