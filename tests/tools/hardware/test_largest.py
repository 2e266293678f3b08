"""The search for the largest number that fits: how many sizes it measures, and what it promises."""

import math

import pytest

from mpjax._src.tools.hardware.largest import largest

LIMIT = 2**20
NUMBERS = [1, 2, 3, 4, 7, 8, 9, 50, 63, 64, 65, 100, 500]
SHAPES = {
    "linear": lambda n: n,
    "a large constant": lambda n: 1e6 + 50 * n,
    "a constant that fills all": lambda n: 1e9 + n,
    "quadratic": lambda n: n * n,
    "attention": lambda n: 1000 + 10 * n + 0.01 * n * n,
    "padded to 8": lambda n: 100 + 8 * math.ceil(n / 8),
    "padded to 64, beside arguments": lambda n: 10**5 + 64000 * math.ceil(n / 64) + n,
    "concave": lambda n: 100 * math.sqrt(n),
    "computed again beyond 60": lambda n: n if n < 60 else 60 + 0.3 * (n - 60),
    "hardly any growth": lambda n: math.log(n + 1),
    "steep": lambda n: n**4,
}


def searched(size, available, limit=LIMIT, **options):
    numbers = []

    def measure(n):
        assert n == int(n) and 1 <= n <= limit and n not in numbers
        numbers.append(n)
        return size(n)

    found = largest(measure, available, limit, **options)
    assert not found.most or size(found.most) <= available, "what is returned does not fit"
    assert not found.most or found.most in numbers or found.most in options["sizes"]
    return found, numbers


def refused(size, available):
    """The same, where a compiler does not say how much is too large."""
    return lambda n: size(n) if size(n) <= available else math.inf


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("most", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_number_is_found_whatever_the_shape(shape, most, proven):
    size = SHAPES[shape]
    available = size(most)
    expected = max(n for n in range(most, most + 100) if size(n) <= available)
    for measured in (size, refused(size, available)):
        found, numbers = searched(measured, available, proven=proven)
        assert found.most == expected
        assert found.predicted or expected + 1 in numbers
        assert not (proven and found.predicted)
        # Twice as many as halves and doubles take, which is what steps that say little may cost.
        assert len(numbers) <= 2 * expected.bit_length() + 6


@pytest.mark.parametrize("shape", [*SHAPES][:3])
@pytest.mark.parametrize("most", [9, 10, 50, 64, 100, 500])
def test_two_sizes_predict_a_linear_memory_and_the_third_confirms_it(shape, most):
    size = SHAPES[shape]
    found, numbers = searched(size, size(most))
    assert (found.most, len(numbers), numbers[0]) == (most, 3, 1) and found.linear
    # Without a constant, the first size is enough to predict the answer, and the third is the next.
    assert found.predicted != (most + 1 in numbers)
    assert found.next_size == pytest.approx(size(most + 1))


def test_a_linear_memory_is_exact_where_the_compiler_refuses_all_that_is_too_large():
    size = SHAPES["a large constant"]
    found, numbers = searched(refused(size, size(500)), size(500))
    assert (found.most, len(numbers)) == (500, 3) and found.predicted


def test_memory_that_is_not_linear_is_said_to_be_so_and_both_sides_are_measured():
    for shape in ("quadratic", "attention", "concave", "padded to 8"):
        size = SHAPES[shape]
        found, numbers = searched(size, size(500))
        assert not found.predicted and {found.most, found.most + 1} <= {*numbers}
        assert found.next_size == size(found.most + 1)
        assert not found.linear or shape == "padded to 8"
    found, numbers = searched(SHAPES["padded to 64, beside arguments"], 10**7)
    assert not found.predicted and found.most + 1 in numbers and found.most % 64 == 0


def test_a_size_off_the_line_is_not_taken_for_a_limit():
    """The program of the smallest batch is another one, so the first prediction is too small."""
    size = lambda n: 150 if n == 1 else 100 + n  # noqa: E731
    found, numbers = searched(size, 1100)
    assert found.most == 1000 and not found.predicted and 1001 in numbers and len(numbers) <= 6


def test_where_memory_falls_again_what_is_returned_fits_and_its_neighbor_does_not():
    """From 100 on parts are computed again, at half the memory."""
    size = lambda n: n if n < 100 else n / 2  # noqa: E731
    for available in (20, 50, 80, 99, 120):
        found, _ = searched(size, available)
        assert found.predicted or size(found.most + 1) > available


def test_all_fit_and_none_does():
    found, numbers = searched(lambda n: n, 2**30, limit=1000)
    assert (found.most, found.next_size, found.predicted) == (1000, None, False)
    assert numbers == [1, 64, 1000]
    assert searched(lambda n: n, 5, limit=1)[0].next_size is None
    found, numbers = searched(lambda n: 7, 5)
    assert (found.most, found.next_size, numbers) == (0, 7, [1])
    assert searched(lambda n: math.inf, 5)[0].next_size == math.inf
    assert searched(lambda n: 0, 5, limit=10**6)[0].most == 10**6  # it takes no memory


def test_what_is_far_too_large_is_not_measured():
    """Even where memory seems to grow by little."""
    _, numbers = searched(lambda n: 10 if n < 300 else n, 280)
    assert max(numbers) <= 64 * 64
    _, numbers = searched(lambda n: n, 10**9, limit=10**9)
    assert all(one <= 64 * max(numbers[:at]) for at, one in enumerate(numbers[1:], 1))


# ---- what is known before ------------------------------------------------------------------------


@pytest.mark.parametrize("most", range(16))
def test_a_size_that_is_known_saves_a_measurement(most):
    """Of a batch that does not fit, the sixteenths that do."""
    size = lambda n: 100 + 7 * n  # noqa: E731
    found, numbers = searched(size, size(most), limit=15, sizes={15.5: size(15.5)})
    assert found.most == most and len(numbers) <= 3
    found, numbers = searched(refused(size, size(most)), size(most), limit=15, sizes={16: math.inf})
    assert found.most == most and len(numbers) <= 6


def test_the_search_goes_on_from_what_fits():
    size = lambda n: 100 + 7 * n  # noqa: E731
    found, numbers = searched(size, size(60), sizes={1: size(1), 40: size(40)})
    assert found.most == 60 and numbers == [60]
