"""Pictures of one world: text for a terminal, PNG and GIF for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tensordict import TensorDict

from hamlet.town.town import Town

CELL, CARD, MARGIN, HEADER = 92, 300, 16, 52
INK, PAPER, FAINT = (38, 42, 48), (250, 249, 246), (205, 205, 200)
AGENTS = (
    (214, 69, 65), (31, 119, 180), (46, 139, 87), (148, 82, 190),
    (222, 135, 30), (23, 150, 160), (160, 100, 60), (90, 90, 90),
)  # fmt: skip
PLACES = (
    (120, 150, 215), (95, 120, 200), (125, 200, 225), (235, 190, 110), (235, 150, 95),
    (240, 150, 160), (225, 105, 120), (190, 160, 220), (170, 210, 130), (205, 130, 190),
    (175, 175, 120), (165, 145, 115), (135, 195, 175), (150, 205, 120),
)  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """One world at one tick as plain Python values."""

    tick: int
    hour: int
    episode: int
    cells: list[int]  # per affordance
    opened: list[bool]
    position: list[tuple[int, int]]
    alive: list[bool]
    meters: list[list[float]]
    cues: list[list[str]]
    action: list[str]
    using: list[str]
    blocked: list[bool]
    reward: list[float]


def snapshot(town: Town, state: TensorDict, world: int) -> Snapshot:
    """Read one world out of a batch. Raises IndexError when `world` is not in it."""
    if not 0 <= world < state.batch_size[0]:
        raise IndexError(f"world {world} is not among the {state.batch_size[0]} of this batch")
    one = state[world : world + 1].cpu()
    tick = int(one["tick"][0])
    phase = int(town.phase_of(one["tick"])[0])
    bits = town.open_bits.table[min(phase, len(town.open_bits.table) - 1)].tolist()
    hour = int(one["hour"][0])
    names = (*town.affordance_names, "")
    shown = one["cue_bits"][0].tolist()
    return Snapshot(
        tick=tick,
        hour=hour,
        episode=int(one["episode"][0]),
        cells=town.affordance_cells[int(one["layout"][0])].tolist(),
        opened=[
            not town.pack.temporal or bool(b >> hour & 1) for b in bits[: town.num_affordances]
        ],
        position=[(x, y) for x, y in one["position"][0].tolist()],
        alive=one["alive"][0].tolist(),
        meters=one["meters"][0].tolist(),
        cues=[[name for c, name in enumerate(town.cue_names) if value >> c & 1] for value in shown],
        action=[town.action_names[a] for a in one["last_action"][0].tolist()],
        using=[names[code] for code in one["used"][0].tolist()],
        blocked=one["blocked"][0].tolist(),
        reward=one["reward"][0].tolist(),
    )


def short_names(names: Sequence[str], length: int = 3) -> list[str]:
    """Distinct abbreviations: the first letters, or the last where those are taken."""
    found: list[str] = []
    for name in names:
        short = name[:length]
        if short in found:
            short = name[0] + name[-(length - 1) :]
        found.append(short.ljust(length))
    return found


def render_ascii(town: Town, state: TensorDict, world: int) -> str:
    """The world as text: places (lower case when closed), agents by number, meters and cues."""
    shot = snapshot(town, state, world)
    shorts = short_names(town.affordance_names)
    grid = {cell: index for index, cell in enumerate(shot.cells)}
    lines = [f"tick {shot.tick}/{town.lifespan}  hour {shot.hour:02d}:00  life {shot.episode}"]
    edge = "+" + "-" * (6 * town.width) + "+"
    lines.append(edge)
    for y in range(town.height):
        row = ""
        for x in range(town.width):
            index = grid.get(y * town.width + x)
            label = " . " if index is None else shorts[index]
            if index is not None:
                label = label.upper() if shot.opened[index] else label.lower()
            here = [
                str(i) for i, spot in enumerate(shot.position) if shot.alive[i] and spot == (x, y)
            ]
            row += f"{label}{''.join(here)[:3]:<3}"
        lines.append(f"|{row}|")
    lines.append(edge)
    for i, meters in enumerate(shot.meters):
        if not shot.alive[i]:
            lines.append(f"{i} dead")
            continue
        levels = " ".join(
            f"{name[:3]} {value:4.2f}" for name, value in zip(town.meter_names, meters, strict=True)
        )
        doing = f"{shot.action[i]} {shot.using[i]}".strip() + (" (blocked)" * shot.blocked[i])
        lines.append(f"{i} {levels}  {doing}  [{', '.join(shot.cues[i])}]")
    return "\n".join(lines)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def render_png(town: Town, state: TensorDict, world: int) -> Image.Image:
    """The world as an RGB image: the map on the left, a card per agent on the right."""
    shot = snapshot(town, state, world)
    card_height = 34 + 17 * town.num_meters + 24
    room = max(town.height * CELL * 11 // 10, 3 * card_height)
    columns = -(-town.num_agents * card_height // room)
    rows = -(-town.num_agents // columns)
    width = MARGIN * 2 + town.width * CELL + columns * (CARD + MARGIN)
    height = HEADER + MARGIN + max(town.height * CELL, rows * card_height)
    image = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(image)
    _header(draw, town, shot, width)
    _map(draw, town, shot)
    for i in range(town.num_agents):
        left = MARGIN * 2 + town.width * CELL + (i // rows) * (CARD + MARGIN)
        _card(draw, town, shot, i, left, HEADER + (i % rows) * card_height)
    return image


def _header(draw: ImageDraw.ImageDraw, town: Town, shot: Snapshot, width: int) -> None:
    night = shot.hour < 6 or shot.hour >= 22
    draw.rectangle((0, 0, width, HEADER - 12), fill=(44, 52, 84) if night else (222, 234, 245))
    ink = (240, 240, 245) if night else INK
    text = (
        f"{town.pack.name}    day {shot.tick // 24 + 1}  {shot.hour:02d}:00    "
        f"tick {shot.tick} of {town.lifespan}"
    )
    draw.text((MARGIN, 9), text, fill=ink, font=_font(20))


def _map(draw: ImageDraw.ImageDraw, town: Town, shot: Snapshot) -> None:
    for y in range(town.height):
        for x in range(town.width):
            left, top = MARGIN + x * CELL, HEADER + y * CELL
            draw.rectangle((left, top, left + CELL, top + CELL), outline=(232, 230, 224))
    for index, cell in enumerate(shot.cells):
        left, top = MARGIN + cell % town.width * CELL, HEADER + cell // town.width * CELL
        box = (left + 5, top + 5, left + CELL - 5, top + CELL - 5)
        colour = PLACES[index % len(PLACES)]
        opened = shot.opened[index]
        pale = tuple((c + 3 * p) // 4 for c, p in zip(colour, PAPER, strict=True))
        draw.rounded_rectangle(
            box, 9, fill=colour if opened else pale, outline=colour, width=1 if opened else 2
        )
        ink = INK if opened else (140, 140, 140)
        draw.text((left + 11, top + 8), town.affordance_names[index], fill=ink, font=_font(14))
        hours = town.pack.affordances[index].hours
        if not opened:
            draw.text((left + 11, top + CELL - 26), "closed", fill=ink, font=_font(13))
        elif town.pack.temporal and (hours[1] - hours[0]) % 24:
            draw.text(
                (left + 11, top + CELL - 26),
                f"{hours[0] % 24}-{hours[1] % 24} h",
                fill=(90, 90, 90),
                font=_font(12),
            )
    for x, y in sorted(set(shot.position)):
        here = [i for i, spot in enumerate(shot.position) if spot == (x, y) and shot.alive[i]]
        for order, i in enumerate(here):
            size = 15 if len(here) < 4 else 10
            cx = MARGIN + x * CELL + CELL * (order + 1) / (len(here) + 1)
            cy = HEADER + y * CELL + CELL * 0.52
            _agent(draw, i, cx, cy, size, shot)


def _agent(
    draw: ImageDraw.ImageDraw, i: int, cx: float, cy: float, size: int, shot: Snapshot
) -> None:
    ring = (255, 255, 255) if not shot.blocked[i] else (255, 215, 0)
    draw.ellipse((cx - size, cy - size, cx + size, cy + size), fill=AGENTS[i % len(AGENTS)],
                 outline=ring, width=3)  # fmt: skip
    draw.text((cx, cy), str(i), fill=(255, 255, 255), font=_font(size + 2), anchor="mm")


def _card(
    draw: ImageDraw.ImageDraw, town: Town, shot: Snapshot, i: int, left: int, top: int
) -> None:
    colour = AGENTS[i % len(AGENTS)] if shot.alive[i] else FAINT
    draw.ellipse((left, top, left + 22, top + 22), fill=colour)
    draw.text((left + 11, top + 11), str(i), fill=(255, 255, 255), font=_font(14), anchor="mm")
    using = f" {shot.using[i]}" if shot.using[i] else ""
    doing = f"{shot.action[i]}{using}" + ("  blocked" if shot.blocked[i] else "")
    draw.text((left + 30, top + 3), doing if shot.alive[i] else "dead", fill=INK, font=_font(15))
    for row, (name, value) in enumerate(zip(town.meter_names, shot.meters[i], strict=True)):
        y = top + 30 + row * 17
        draw.text((left, y - 2), name, fill=(100, 100, 100), font=_font(12))
        start, end = left + 72, left + CARD - 46
        draw.rectangle((start, y, end, y + 11), fill=(232, 230, 224))
        level = max(0.0, min(1.0, value))
        fill = (200, 75, 70) if level < 0.3 else (215, 165, 70) if level < 0.5 else (90, 160, 100)
        if level > 0 and shot.alive[i]:
            draw.rectangle((start, y, start + (end - start) * level, y + 11), fill=fill)
        draw.text((end + 6, y - 2), f"{value:.2f}", fill=(100, 100, 100), font=_font(12))
    cues = ", ".join(name.replace("_", " ") for name in shot.cues[i]) or "no cues"
    y = top + 30 + town.num_meters * 17
    draw.text((left, y), cues if shot.alive[i] else "", fill=(120, 80, 130), font=_font(13))


def save_gif(frames: Sequence[Image.Image], path: str | Path, frames_per_second: int = 6) -> None:
    """Write frames as an endless GIF, through a temporary file.

    Raises ValueError when there is no frame.
    """
    if not frames:
        raise ValueError("frames: a GIF needs at least one frame")
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    palette = _palette(frames)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    small[0].save(
        temporary,
        format="GIF",
        save_all=True,
        append_images=small[1:],
        duration=1000 // frames_per_second,
        loop=0,
    )
    temporary.replace(path)


def _palette(frames: Sequence[Image.Image]) -> Image.Image:
    """256 colours for all frames, found on a few of them, thinned out: to find them for each takes
    ten times as long as to draw it, and of 64 none was left for some of the agents."""
    few = [
        frame.resize((-(-frame.width // 4), -(-frame.height // 4)), Image.Resampling.NEAREST)
        for frame in frames[:: -(-len(frames) // 8)]
    ]
    sheet = Image.new("RGB", (few[0].width, few[0].height * len(few)))
    for number, frame in enumerate(few):
        sheet.paste(frame, (0, frame.height * number))
    return sheet.quantize(256)


__all__ = ["render_ascii", "render_png", "save_gif", "snapshot"]
