# mypy: ignore-errors
"""The contended town once more, in numba: the physical reference for the speed of the tensor town.

Benchmark only. One loop over worlds in parallel, everything of a world in registers and cache, the
same numbers and the same observation. Covers packs like `l4_contention`: atomic, temporal, one test
per cue, no schedule, families, distance limits, preconditions, refunds or named effects.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from hamlet.town import Town
from hamlet.town.schema import BASE_ACTIONS
from hamlet.town.town import STREAM_LAYOUT, STREAM_START

f32, u32, u64 = np.float32, np.uint32, np.uint64
STREAM_ACTIONS = 9000


@nb.njit(cache=True)
def mix(x):
    x = ((x ^ (x >> u64(16))) * u64(0x7FEB352D)) & u64(0xFFFFFFFF)
    x = ((x ^ (x >> u64(15))) * u64(0x31848BAB)) & u64(0xFFFFFFFF)
    return x ^ (x >> u64(16))


@nb.njit(cache=True)
def tick_hash(key, tick, stream):
    return mix((mix(key ^ u64(tick)) + u64(stream) * u64(0x1E3779B9)) & u64(0xFFFFFFFF))


@nb.njit(cache=True)
def episode_key(seed, world, episode):
    key = mix((seed & u64(0xFFFFFFFF)) ^ u64(0x5851F42D))
    key = mix(key ^ (seed >> u64(32)))
    key = mix(key ^ u64(world))
    return mix(key ^ u64(episode))


def tables(town: Town) -> dict[str, Any]:
    """The pack as arrays. Raises ValueError for a pack this twin does not cover."""
    pack = town.pack
    plain = all(
        not (a.distance_limit or a.preconditions or a.refund or a.on_completion) and a.interruptible
        for a in pack.affordances
    )
    tests = [(*cue.all_of, *cue.any_of) for cue in pack.cues]
    steady = all(cue.reliability == 1.0 and cue.false_positive == 0.0 for cue in pack.cues)
    if (
        pack.mode != "atomic" or not pack.temporal or pack.families or pack.schedule or not plain
        or not steady or any(len(test) != 1 for test in tests)
    ):  # fmt: skip
        raise ValueError(f"{pack.name}: the numba twin only covers packs like l4_contention")
    k, f = len(pack.meters), len(pack.affordances)
    index = town.meter_index
    actions = np.zeros((town.num_actions, k), np.float32)
    for number, custom in enumerate(pack.actions, start=len(BASE_ACTIONS)):
        for name, amount in custom.effects.items():
            actions[number, index[name]] = amount
    for name, price in pack.move_price.items():
        actions[:4, index[name]] = -price
    for name, price in pack.interact_price.items():
        actions[4, index[name]] = -price

    def columns(per_meter: list) -> np.ndarray:
        found = np.zeros((f + 1, k), np.float32)
        for meter, column in enumerate(per_meter):
            if column is not None:
                found[:, meter] = column.table[0].numpy()
        return found

    cues = np.zeros((len(pack.cues), 4), np.int64)  # kind, meter or bits, streak, decay
    bounds = np.zeros(len(pack.cues), np.float32)
    for number, (cue, (test,)) in enumerate(zip(pack.cues, tests, strict=True)):
        kind, what = 0, 0
        if test.meter is not None:
            kind, what = int(test.below is None), index[test.meter]
            bounds[number] = test.above if test.below is None else test.below
        for code, names, known in ((2, test.using, town.affordance_names),
                                   (3, test.at, town.affordance_names),
                                   (4, test.action, town.action_names)):  # fmt: skip
            if names is not None:
                kind, what = code, sum(1 << list(known).index(name) for name in names)
        cues[number] = kind, what, cue.streak, cue.decay
    mods = np.array([[index[m.source], index[m.target]] for m in pack.modulations], np.int64)
    links = np.array([[index[c.source], index[c.target]] for c in pack.cascades], np.int64)
    return {
        "actions": actions,
        "price": columns(town.prices),
        "per_tick": columns(town.effects_per_tick),
        "completion": columns(town.effects_on_completion),
        "duration": town.durations.table[0].numpy(),
        "open_bits": town.open_bits.table[0].numpy(),
        "capacity": town.capacities.table[0].numpy(),
        "depletion": np.array(town.depletions[0], np.float32),
        "mods": mods.reshape(-1, 2),
        "mod_values": np.array([[m.rate, m.base, m.range] for m in pack.modulations],
                               np.float32).reshape(-1, 3),
        "links": links.reshape(-1, 2),
        "link_values": np.array([[c.threshold, c.strength] for c in pack.cascades],
                                np.float32).reshape(-1, 2),
        "terminal": np.array([index[c.meter] for c in pack.terminal], np.int64),
        "reward": np.array([index[name] for name in pack.reward.meters], np.int64),
        "initial": np.array([m.initial for m in pack.meters], np.float32),
        "cues": cues,
        "bounds": bounds,
        "order": np.argsort(town.cue_rules.rank),
        "place": town.place_table.int().numpy().reshape(town.num_layouts, -1),
        "view": town.view_table.numpy().view(np.uint8),
        "sizes": np.array([town.width, town.height, town.lifespan, pack.vision, pack.cue_distance,
                           pack.cues_broadcast, town.num_layouts, pack.start_hour], np.int64),
    }  # fmt: skip


def new_world_arrays(town: Town, worlds: int) -> dict[str, np.ndarray]:
    n, k, c = town.num_agents, town.num_meters, town.num_cues
    side, m = 2 * town.vision + 1, town.num_agents - 1
    ints = ("x", "y", "progress", "last", "place", "used", "action", "bits")
    state = {name: np.zeros((worlds, n), np.int32) for name in ints}
    state |= {name: np.zeros((worlds, n), np.bool_) for name in ("alive", "blocked", "done")}
    state |= {name: np.zeros(worlds, np.int64) for name in ("tick", "hour", "layout", "episode")}
    state |= {
        "key": np.zeros(worlds, np.uint64),
        "wanted": np.zeros((worlds, n), np.int32),
        "ticket": np.zeros((worlds, n), np.uint32),
        "sums": np.zeros((worlds, k), np.float32),
        "meters": np.zeros((worlds, n, k), np.float32),
        "reward": np.zeros((worlds, n), np.float32),
        "streak": np.zeros((worlds, n, c), np.uint8),
        "hold": np.zeros((worlds, n, c), np.uint8),
        "o_view": np.zeros((worlds, n, side * side), np.uint8),
        "o_occupancy": np.zeros((worlds, n, side * side), np.uint8),
        "o_self": np.zeros((worlds, n, town.self_dim), np.float32),
        "o_cues": np.zeros((worlds, n, m, c), np.float32),
        "o_visible": np.zeros((worlds, n, m), np.bool_),
        "o_offset": np.zeros((worlds, n, m, 2), np.float32),
        "o_action": np.zeros((worlds, n, m), np.int64),
        "o_comm": np.zeros((worlds, n, m), np.int64),
        "o_mask": np.zeros((worlds, n, town.num_actions), np.bool_),
    }
    return state


class Twin:
    """The same worlds as `town.reset(seed, worlds)`, advanced in place by `step`."""

    def __init__(self, town: Town, seed: int, worlds: int):
        self.constants, self.state = tables(town), new_world_arrays(town, worlds)
        self._arguments = (*self.constants.values(), *self.state.values())
        self.seed = u64(seed)
        _advance(self.seed, True, *self._arguments)

    def step(self) -> None:
        """Random legal actions by the counter hash, a tick, auto-reset and observation."""
        _advance(self.seed, False, *self._arguments)


@nb.njit(parallel=True, cache=True, error_model="numpy")
def _advance(
    seed, fresh, act, price, per_tick, completion, duration, open_bits, capacity, depletion, mods,
    mod_values, links, link_values, terminal, reward_meters, initial, cues, bounds, order,
    places, views, sizes,
    x, y, progress, last, place, used, action, bits, alive, blocked, done, tick, hour, layout,
    episode, key, wanted, ticket, sums, meters, reward, streak, hold, o_view, o_occupancy, o_self,
    o_cues, o_visible, o_offset, o_action, o_comm, o_mask,
):  # fmt: skip
    worlds, n, k = meters.shape
    width, height, lifespan, vision = sizes[0], sizes[1], sizes[2], sizes[3]
    cue_distance, broadcast, layouts = sizes[4], sizes[5], sizes[6]
    count, side, num_actions = len(cues), 2 * vision + 1, act.shape[0]
    for w in nb.prange(worlds):
        over = fresh
        if not fresh:
            for i in range(n):  # random legal action
                options, chosen = 0, 5
                for a in range(num_actions):
                    options += o_mask[w, i, a]
                draw = tick_hash(key[w], tick[w], STREAM_ACTIONS + i) >> u64(16)
                left = (np.int64(draw) * options) >> 16  # legal actions before the chosen one
                for a in range(num_actions):
                    if o_mask[w, i, a]:
                        if left == 0:
                            chosen = a
                        left -= 1
                if alive[w, i]:
                    action[w, i] = chosen
                    ox, oy = x[w, i], y[w, i]
                    nx = min(max(ox + (chosen == 3) - (chosen == 2), 0), width - 1)
                    ny = min(max(oy + (chosen == 1) - (chosen == 0), 0), height - 1)
                    if nx != ox or ny != oy:
                        progress[w, i], last[w, i] = 0, -1
                    x[w, i], y[w, i] = nx, ny
                    place[w, i] = places[layout[w], ny * width + nx]
                wanted[w, i] = -1
                p = place[w, i]
                if alive[w, i] and chosen == 4 and p >= 0 and (open_bits[p] >> hour[w]) & 1:
                    can = True
                    for j in range(k):
                        can = can and meters[w, i, j] >= price[p, j]
                    if can:
                        wanted[w, i] = p
                ticket[w, i] = tick_hash(key[w], tick[w], i)
            everyone_done = True
            for i in range(n):
                used[w, i], blocked[w, i] = -1, False
                complete = False
                if wanted[w, i] >= 0:
                    ahead = 0
                    for j in range(n):
                        ahead += wanted[w, j] == wanted[w, i] and ticket[w, j] < ticket[w, i]
                    if ahead < capacity[wanted[w, i]]:
                        used[w, i] = wanted[w, i]
                        progress[w, i] = progress[w, i] + 1 if last[w, i] == wanted[w, i] else 1
                        last[w, i] = wanted[w, i]
                        complete = progress[w, i] == duration[wanted[w, i]]
                        if complete:
                            progress[w, i], last[w, i] = 0, -1
                    else:
                        blocked[w, i] = True
                if not alive[w, i]:
                    reward[w, i] = f32(0.0)
                    done[w, i] = True
                    continue
                old, new = meters[w, i], sums[w]
                u = used[w, i]
                for j in range(k):
                    value = old[j] + act[action[w, i], j]
                    if u >= 0:
                        value = value - price[u, j]
                        value = value + per_tick[u, j]
                        if complete:
                            value = value + completion[u, j]
                    new[j] = value - depletion[j]
                for q in range(len(mods)):
                    rate, base, span = mod_values[q, 0], mod_values[q, 1], mod_values[q, 2]
                    new[mods[q, 1]] -= rate * (base + span * (f32(1.0) - old[mods[q, 0]]))
                for q in range(len(links)):
                    threshold, strength = link_values[q, 0], link_values[q, 1]
                    if old[links[q, 0]] < threshold:
                        deficit = (threshold - old[links[q, 0]]) / threshold
                        new[links[q, 1]] -= strength * deficit
                for j in range(k):
                    meters[w, i, j] = min(max(new[j], f32(0.0)), f32(1.0))
                for j in terminal:
                    if meters[w, i, j] <= f32(0.0):
                        alive[w, i] = False
                value = f32(1.0)
                for j in reward_meters:
                    value = value * meters[w, i, j]
                reward[w, i] = value if alive[w, i] else f32(0.0)
                done[w, i] = not alive[w, i] or tick[w] + 1 >= lifespan
                everyone_done = everyone_done and done[w, i]
            tick[w] += 1
            hour[w] = (hour[w] + 1) % 24
            over = everyone_done
        if over:
            episode[w] += 0 if fresh else 1
            key[w] = episode_key(seed, w, episode[w])
            tick[w], hour[w] = 0, sizes[7]
            layout[w] = (tick_hash(key[w], 0, STREAM_LAYOUT) * u64(layouts)) >> u64(32)
            for i in range(n):
                spot = (tick_hash(key[w], 0, STREAM_START + i) * u64(width * height)) >> u64(32)
                cell = np.int64(spot)
                x[w, i], y[w, i] = cell % width, cell // width
                place[w, i] = places[layout[w], cell]
                progress[w, i], last[w, i], used[w, i] = 0, -1, -1
                action[w, i], alive[w, i], blocked[w, i] = 5, True, False
                for j in range(k):
                    meters[w, i, j] = initial[j]
                for c in range(count):
                    streak[w, i, c], hold[w, i, c] = 0, 0
        for i in range(n):  # cues
            raised_bits = 0
            for c in range(count):
                kind, what = cues[c, 0], cues[c, 1]
                raised = False
                if kind == 0:
                    raised = meters[w, i, what] < bounds[c]
                elif kind == 1:
                    raised = meters[w, i, what] > bounds[c]
                else:
                    code = used[w, i] if kind == 2 else place[w, i] if kind == 3 else action[w, i]
                    raised = code >= 0 and (what >> code) & 1 == 1
                if cues[c, 2] > 1:
                    streak[w, i, c] = min(streak[w, i, c] + 1, cues[c, 2]) if raised else 0
                    raised = streak[w, i, c] >= cues[c, 2]
                if cues[c, 3] > 0:
                    held = hold[w, i, c] > 0
                    if raised:
                        hold[w, i, c] = cues[c, 3]
                    elif held:
                        hold[w, i, c] -= 1
                    raised = raised or held
                raised_bits |= np.int64(raised) << c
            shown, found = 0, 0
            for c in order:
                if (raised_bits >> c) & 1 and found < broadcast:
                    shown |= np.int64(1) << c
                    found += 1
            bits[w, i] = shown
        angle = f32(hour[w]) * f32(2.0 * np.pi / 24.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        for i in range(n):  # observation
            row = layout[w] * width * height + y[w, i] * width + x[w, i]
            for q in range(side * side):
                o_view[w, i, q] = views[row, q]
                o_occupancy[w, i, q] = 0
            for slot in range(n - 1):
                j = slot + (slot >= i)
                dx, dy = x[w, j] - x[w, i], y[w, j] - y[w, i]
                apart = max(abs(dx), abs(dy))
                if alive[w, j] and apart <= vision:
                    o_occupancy[w, i, (dy + vision) * side + dx + vision] += 1
                seen = alive[w, j] and apart <= cue_distance
                o_visible[w, i, slot] = seen
                for c in range(count):
                    o_cues[w, i, slot, c] = f32((bits[w, j] >> c) & 1) if seen else f32(0.0)
                o_offset[w, i, slot, 0] = f32(dx) * f32(0.25) if seen else f32(0.0)
                o_offset[w, i, slot, 1] = f32(dy) * f32(0.25) if seen else f32(0.0)
                o_action[w, i, slot] = action[w, j] if seen else num_actions
                o_comm[w, i, slot] = 0
            for q in range(k):
                o_self[w, i, q] = meters[w, i, q]
            o_self[w, i, k] = f32(x[w, i]) * f32(1.0 / (width - 1))
            o_self[w, i, k + 1] = f32(y[w, i]) * f32(1.0 / (height - 1))
            o_self[w, i, k + 2] = sine
            o_self[w, i, k + 3] = cosine
            o_self[w, i, k + 4] = f32(progress[w, i]) * f32(0.1)
            o_self[w, i, k + 5] = f32(tick[w]) * f32(1.0 / lifespan)
            o_self[w, i, k + 6] = f32(blocked[w, i])
            p, lives = place[w, i], alive[w, i]
            o_mask[w, i, 0] = lives and y[w, i] > 0
            o_mask[w, i, 1] = lives and y[w, i] < height - 1
            o_mask[w, i, 2] = lives and x[w, i] > 0
            o_mask[w, i, 3] = lives and x[w, i] < width - 1
            o_mask[w, i, 4] = lives and p >= 0 and (open_bits[p] >> hour[w]) & 1 == 1
            o_mask[w, i, 5] = True
            for a in range(6, num_actions):
                o_mask[w, i, a] = lives
