"""Changes of layout: how the axes of one array correspond to those of another."""

import numpy as np
import pytest

from mpjax._src.core.program.views import own_axes, reshaped


@pytest.mark.parametrize(
    ("shape", "new"),
    [
        ((6, 4), (24,)),
        ((24,), (6, 4)),
        ((6, 4), (2, 3, 4)),
        ((2, 3, 4), (6, 4)),
        ((6, 4), (2, 12)),
        ((6, 1, 4), (1, 6, 4)),
    ],
)
def test_axes_after_a_reshape_say_where_an_entry_was(shape, new):
    before = np.zeros((len(shape), *new), int)
    for axis, rest in zip(reshaped(own_axes(shape), new), np.indices(new), strict=True):
        for place, stride, size in reversed(axis):
            before[place] += rest % size * stride
            rest = rest // size
    entries = np.ravel_multi_index(tuple(before), shape)
    assert np.array_equal(entries, np.arange(entries.size).reshape(new))


def test_reshaped_is_none_where_a_reshape_mixes_axes():
    assert reshaped(own_axes((6, 4)), (4, 6)) is None
