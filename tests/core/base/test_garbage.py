"""Python looks for garbage again when what many objects are made for has ended."""

import gc

import pytest

from mpjax._src.core.base.garbage import collected_later


@collected_later()
def fails():
    assert not gc.isenabled()
    raise ValueError


def test_garbage_is_looked_for_again_after_an_error():
    with collected_later():
        with collected_later():
            pass
        assert not gc.isenabled()
        with pytest.raises(ValueError):
            fails()
        assert not gc.isenabled()
    with pytest.raises(ValueError):
        fails()
    assert gc.isenabled()


def test_who_switched_it_off_keeps_it_off():
    gc.disable()
    try:
        with collected_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
