"""The faults that `mutation.py` plants."""

from __future__ import annotations

from tests.faults import faults_in


def test_a_difference_has_no_order_within_what_is_even(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "def f(a, b):\n    return (a - b).abs() + abs(b - a) + (a / b).abs() + (a - a)\n"
    )
    orders = [(fault.old, fault.new) for fault in faults_in(str(file)) if fault.what == "order"]
    assert orders == [("a / b", "(b / a)")]
    file.write_text("def f(a, b):\n    return a - b\n")
    assert {fault.what for fault in faults_in(str(file))} == {"operator", "dropped term", "order"}
