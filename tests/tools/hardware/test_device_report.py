"""device_report, as data and as a table."""

import dataclasses
import json

import jax

import mpjax
from mpjax._src.tools.hardware import devices


def test_device_report_is_data_and_a_table():
    report = mpjax.hardware.device_report()
    assert len(report.devices) == len(jax.local_devices())
    assert json.loads(json.dumps(report.to_dict()))["jax_version"] == jax.__version__
    text = str(report)
    assert f"{len(report.devices)} x {report.devices[0].name}" in text
    assert report.devices[0].policy in text and report.devices[0].reason in text


def test_device_report_shows_the_time_of_a_matmul_beside_the_verdict(monkeypatch):
    """A busy machine changes the time, and neither the devices nor the policy."""
    reports = []
    for factor in (0.5, 3.0):
        monkeypatch.setattr(devices, "matmul_time", lambda dtype, seconds, factor=factor: factor)
        reports.append(mpjax.hardware.device_report())
    idle, busy = reports
    assert idle == busy and idle.devices == busy.devices
    assert busy.matmul_times == {"float16": 3.0, "bfloat16": 3.0}
    assert "A matmul just took 0.50x in float16 and 0.50x in bfloat16" in str(idle)
    assert "A matmul" not in str(dataclasses.replace(idle, matmul_times={}))
