"""A class names the module in which users find it."""

import pickle
import sys

import cloudpickle

import mpjax
from mpjax._src.core.base.public import public
from mpjax._src.core.policy.policy import Policy


def test_public_changes_only_the_module_of_a_class():
    class Report:
        """Says something."""

    assert public("mpjax.reports")(Report) is Report
    assert (Report.__module__, Report.__doc__) == ("mpjax.reports", "Says something.")


def test_a_pickle_names_the_public_module():
    assert pickle.dumps(Policy, protocol=0) == b"cmpjax\nPolicy\np0\n."


def test_a_class_is_stored_by_its_name_by_cloudpickle_too(monkeypatch):
    """Which looks among the modules that are imported: a class of another process is another."""
    report = mpjax.reports.CastReport
    monkeypatch.delitem(sys.modules, "mpjax.reports")
    state = public("mpjax.reports")(report)
    assert "mpjax.reports" in sys.modules
    assert cloudpickle.dumps(state) == pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
