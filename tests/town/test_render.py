"""Pictures show what is: every place, agent, meter and hour is where the state says it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from hamlet.town import Town, load_pack, render_ascii, render_png, save_gif
from hamlet.town.render import AGENTS, CARD, CELL, HEADER, MARGIN, PLACES, short_names, snapshot
from hamlet.town.schema import INTERACT

TOWN = Town(load_pack("l7_scarce"), num_layouts=8)
FILLS = {"little": (200, 75, 70), "half": (215, 165, 70), "enough": (90, 160, 100)}
LEVELS = [0.1, 0.4, 0.9, 0.29, 0.31, 0.49, 0.51, 1.0]
PAPER, TRACK = (250, 249, 246), (232, 230, 224)


def world(hour: int = 12, **changes):
    """Two worlds; all stand in the corner but the first agent, who stands in the first place."""
    state = TOWN.reset(3, 2)
    first = int(TOWN.affordance_cells[state["layout"][1]][0])
    position = torch.zeros(2, TOWN.num_agents, 2, dtype=state["position"].dtype)
    position[1, 0] = torch.tensor([first % TOWN.width, first // TOWN.width])
    meters = torch.tensor(LEVELS).expand(2, TOWN.num_agents, -1).clone()
    told = {"position": position, "meters": meters, "hour": torch.full((2,), hour)} | changes
    return TOWN.rearrange(state, **told)


def pixels(state) -> np.ndarray:
    return np.asarray(render_png(TOWN, state, 1))


def test_every_place_is_drawn_in_its_cell_and_pale_while_it_is_closed():
    state = world()
    shot, seen = snapshot(TOWN, state, 1), pixels(state)
    assert {True, False} == set(shot.opened)
    for index, cell in enumerate(shot.cells):
        left, top = MARGIN + cell % TOWN.width * CELL, HEADER + cell // TOWN.width * CELL
        colour = PLACES[index % len(PLACES)]
        pale = tuple((c + 3 * p) // 4 for c, p in zip(colour, PAPER, strict=True))
        expected = colour if shot.opened[index] else pale
        assert tuple(seen[top + 40, left + 9]) == expected
        assert tuple(seen[top + CELL // 2, left + 5]) == colour  # its border
        opens, closes = TOWN.pack.affordances[index].hours
        below = seen[top + CELL - 26 : top + CELL - 10, left + 11 : left + CELL - 10]
        told = not shot.opened[index] or (closes - opens) % 24 != 0  # "closed", or its hours
        assert (below != expected).any() == told
    empty = next(c for c in range(TOWN.width * TOWN.height) if c not in shot.cells and c > 0)
    x, y = empty % TOWN.width, empty // TOWN.width
    assert tuple(seen[HEADER + y * CELL + 30, MARGIN + x * CELL + 30]) == PAPER
    for x in range(TOWN.width):  # lines between the cells, where no place covers them
        bare = [y for y in range(TOWN.height) if y * TOWN.width + x not in shot.cells]
        assert any(tuple(seen[HEADER + y * CELL + 30, MARGIN + x * CELL]) == TRACK for y in bare), x


def test_who_is_alive_stands_in_its_cell():
    state = world()
    x, y = state["position"][1, 0].tolist()

    def colours(image):
        part = image[HEADER + y * CELL : HEADER + (y + 1) * CELL]
        part = part[:, MARGIN + x * CELL : MARGIN + (x + 1) * CELL]
        return {tuple(pixel) for pixel in part.reshape(-1, 3)}

    assert AGENTS[0] in colours(pixels(state))
    assert AGENTS[1] not in colours(pixels(state))
    dead = state["alive"].clone()
    dead[1, 0] = False
    assert AGENTS[0] not in colours(pixels(TOWN.rearrange(state, alive=dead)))
    centre = pixels(state)[HEADER + y * CELL + int(CELL * 0.52)][MARGIN + x * CELL :][:CELL]
    columns = [i for i, pixel in enumerate(centre) if tuple(pixel) == AGENTS[0]]
    assert abs(np.mean(columns) - CELL / 2) < 3


def test_a_card_has_a_bar_for_every_meter_of_its_length_and_colour():
    seen = pixels(world())
    card_height = 34 + 17 * TOWN.num_meters + 24
    room = max(TOWN.height * CELL * 11 // 10, 3 * card_height)
    columns = -(-TOWN.num_agents * card_height // room)
    rows = -(-TOWN.num_agents // columns)
    for agent in range(TOWN.num_agents):
        left = MARGIN * 2 + TOWN.width * CELL + (agent // rows) * (CARD + MARGIN)
        top = HEADER + (agent % rows) * card_height
        assert tuple(seen[top + 4, left + 11]) == AGENTS[agent % len(AGENTS)]
        doing = seen[top + 3 : top + 22, left + 30 : left + CARD]  # beside the disc
        assert (doing != PAPER).any()
        start, end = left + 72, left + CARD - 46
        for row, level in enumerate(LEVELS):
            bar = seen[top + 30 + row * 17 + 5, start : end + 1]
            fill = FILLS["little" if level < 0.3 else "half" if level < 0.5 else "enough"]
            filled = [tuple(pixel) == fill for pixel in bar]
            assert filled == sorted(filled, reverse=True)
            assert sum(filled) == pytest.approx(1 + (end - start) * level, abs=1.5), (agent, row)
            assert all(tuple(pixel) in (fill, TRACK) for pixel in bar)


def test_the_sky_is_dark_at_night():
    def sky(hour):
        return tuple(pixels(world(hour=hour))[2, 2])

    assert [sky(hour) for hour in (5, 22, 23, 0)] == [(44, 52, 84)] * 4
    assert [sky(hour) for hour in (6, 12, 21)] == [(222, 234, 245)] * 3
    seen = pixels(world(hour=0))
    night = (seen == (44, 52, 84)).all(-1)
    assert night[HEADER - 12, :3].all()
    assert night[0, -1]
    assert not night[HEADER - 11 :].any()


def test_a_world_as_text():
    state = TOWN.step_core(world(), torch.full((2, TOWN.num_agents), INTERACT))
    shot = snapshot(TOWN, state, 1)
    lines = render_ascii(TOWN, state, 1).splitlines()
    assert lines[0] == f"tick 1/{TOWN.lifespan}  hour {int(state['hour'][1]):02d}:00  life 0"
    assert lines[1] == lines[2 + TOWN.height] == "+" + "-" * 6 * TOWN.width + "+"
    shorts = short_names(TOWN.affordance_names)
    for index, cell in enumerate(shot.cells):
        x, y = cell % TOWN.width, cell // TOWN.width
        shown = lines[2 + y][1 + 6 * x : 7 + 6 * x]
        name = shorts[index].upper() if shot.opened[index] else shorts[index].lower()
        here = [str(i) for i, spot in enumerate(shot.position) if spot == (x, y)]
        assert shown == f"{name}{''.join(here)[:3]:<3}"
    told = lines[3 + TOWN.height :]
    assert len(told) == TOWN.num_agents
    for i, line in enumerate(told):
        for name, value in zip(TOWN.meter_names, shot.meters[i], strict=True):
            assert f"{name[:3]} {value:4.2f}" in line
        assert line.startswith(f"{i} ")
        assert line.endswith(f"[{', '.join(shot.cues[i])}]")
    dead = TOWN.rearrange(state, alive=torch.zeros_like(state["alive"]))
    assert render_ascii(TOWN, dead, 1).splitlines()[3 + TOWN.height] == "0 dead"


def test_names_are_told_apart_where_their_first_letters_are_the_same():
    assert short_names(["Bed", "Bench", "Benzo", "Ox"]) == ["Bed", "Ben", "Bzo", "Ox "]


def test_a_world_that_is_not_there():
    for number in (-1, 2):
        with pytest.raises(IndexError, match=f"world {number} is not among the 2"):
            snapshot(TOWN, world(), number)


def test_a_gif_tells_the_agents_apart(tmp_path):
    frames = [render_png(TOWN, world(), 0)] * 2
    save_gif(frames, tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as made:
        kept = {colour for _, colour in made.convert("RGB").getcolors(1 << 16)}
    for agent in range(TOWN.num_agents):
        nearest = min(max(abs(a - b) for a, b in zip(AGENTS[agent], c)) for c in kept)
        assert nearest <= 2, agent


def test_a_gif_has_every_frame_at_its_pace_and_goes_on_for_ever(tmp_path):
    frames = [Image.new("RGB", (4, 4), (40 * i, 0, 0)) for i in range(5)]
    save_gif(frames, str(tmp_path / "a.gif"), frames_per_second=4)
    with Image.open(tmp_path / "a.gif") as made:
        assert made.n_frames == 5
        assert made.info["duration"] == 250
        assert made.info["loop"] == 0
        for i in range(5):
            made.seek(i)
            assert made.convert("RGB").getpixel((1, 1))[0] == pytest.approx(40 * i, abs=4)
    with pytest.raises(ValueError, match="at least one frame"):
        save_gif([], tmp_path / "b.gif")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gif"]
