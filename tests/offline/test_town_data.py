"""The town's data set as a Minari data set, and back."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("minari")
from hamlet.artifacts import HamletError, read_json, write_card
from hamlet.modules.contracts import OBSERVATION_DTYPES
from hamlet.offline.log_store import FINAL, TERMINATED
from hamlet.offline.open_log import open_log
from hamlet.offline.town_data import from_town, to_town

T, W, N, ACTIONS = 12, 2, 3, 5
TRAILING = {
    "view": (5, 5), "occupancy": (5, 5), "self_state": (4,), "cues": (2, 6), "visible": (2,),
    "others_offset": (2, 2), "others_action": (2,), "comm": (2,), "action_mask": (ACTIONS,),
}  # fmt: skip


@pytest.fixture
def dataset(tmp_path):
    """Random rows. World 0 begins anew at tick 7; there agent 1 dies at tick 3, and the others'
    lives end at 6. World 1 begins anew in its last tick."""
    rng = torch.Generator().manual_seed(0)
    shape = (T, W, N)
    rows = {}
    for name, dtype in OBSERVATION_DTYPES.items():
        x = torch.randint(0, 200, (*shape, *TRAILING[name]), generator=rng)
        rows[name] = x > 90 if dtype == "bool" else x.to(getattr(torch, dtype)) / 1
        rows[name] = rows[name].to(getattr(torch, dtype))
    rows["action_mask"][:] = True
    alive, done = torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    alive[4:7, 0, 1] = False
    done[3, 0, 1] = done[6, 0, 0] = done[6, 0, 2] = True
    done[T - 2, 1] = True
    first = torch.zeros(T, W, dtype=torch.bool)
    first[0] = first[7, 0] = first[T - 1, 1] = True
    rows |= {
        "action": torch.randint(ACTIONS, shape, generator=rng),
        "goal": torch.randint(6, shape, generator=rng),
        "reward": torch.rand(shape, generator=rng),
        "done": done, "alive": alive, "first": first,
        "meters": torch.rand(*shape, 8, generator=rng),
        "position": torch.randint(9, (*shape, 2), generator=rng).int(),
        "others_meters": torch.rand(*shape, 2, 8, generator=rng),
        "hour": torch.randint(24, (T, W), generator=rng).int(),
        # As many places as agents: what a field belongs to does not hang on its size.
        "places": torch.randint(99, (T, W, N), generator=rng).to(torch.int16),
    }  # fmt: skip
    path = tmp_path / "dataset"
    TensorDict(rows, batch_size=[T, W]).memmap(path)
    fields = [
        {"name": name, "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
        for name, x in sorted(rows.items())
    ]
    write_card(path, "dataset", {"fields": fields}, pack="0" * 64, extra={"worlds": W})
    return path


def test_there_and_back_every_row_is_equal(dataset, tmp_path):
    assert from_town(dataset, tmp_path / "minari") == 12
    assert to_town(tmp_path / "minari", tmp_path / "again") == T * W
    before, after = (TensorDict.load_memmap(x) for x in (dataset, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype, name
        assert torch.equal(after[name], value), name
    cards = [read_json(tmp_path / f"{x}.json") for x in ("dataset", "again")]
    assert [card.pop("file") for card in cards] == ["dataset", "again"]
    assert cards[0] == cards[1]  # the same bytes: their sha256 stands there


def test_lives_are_episodes_that_end_where_lives_do(dataset, tmp_path):
    from_town(dataset, tmp_path / "minari")
    store = open_log(tmp_path / "minari", None, tmp_path / "cache")
    rows = TensorDict.load_memmap(dataset)
    ends = []
    for start, stop in zip(store.starts, store.starts[1:], strict=False):
        flags = store.flags[start:stop]
        assert flags[-1] == FINAL
        ends.append((int(stop - start - 1), bool(flags[-2] & TERMINATED)))
    world_0 = [(7, True), (4, True), (7, True), (4, False), (4, False), (4, False)]
    world_1 = [(11, True)] * 3 + [(1, False)] * 3
    assert ends == world_0 + world_1
    # The dead agent's last observation follows its last action.
    seen = torch.as_tensor(store.fields["self_state"][store.starts[1] : store.starts[2]])
    assert torch.equal(seen, rows["self_state"][:5, 0, 1])
    reward = torch.as_tensor(store.reward[store.starts[1] : store.starts[2] - 1])
    assert torch.equal(reward, rows["reward"][:4, 0, 1])


def test_what_is_no_data_set_is_one_line(dataset, tmp_path):
    from_town(dataset, tmp_path / "minari")
    with pytest.raises(HamletError, match="minari exists"):
        from_town(dataset, tmp_path / "minari")
    with pytest.raises(HamletError, match="dataset exists"):
        to_town(tmp_path / "minari", dataset)
    with pytest.raises(HamletError, match="is not a Minari data set"):
        to_town(dataset, tmp_path / "again")
