"""The cost of a tick, counted: it may not grow without somebody saying so."""

import json
from copy import deepcopy

from benchmarks.counts import RESULTS, default_params, grown, measure

WRITE = "if it must be, take the new counts with `python -m benchmarks.counts --write`"


def test_no_part_of_a_tick_costs_more_than_it_did():
    before = json.loads(RESULTS.read_text(encoding="utf-8"))
    now = measure(default_params())
    assert now.keys() == before.keys()
    assert not grown(now, before), WRITE


def test_what_has_grown_by_more_than_a_tenth_is_named():
    before = {"think": {"operations": 100, "flop": 1000}}
    now = deepcopy(before)
    now["think"]["flop"] = 1100
    assert grown(now, before) == []
    now["think"]["flop"] = 1101
    assert grown(now, before) == ["think: 1101 flop where there were 1000"]
    now["more"] = {"operations": 1}
    assert len(grown(now, before)) == 2
