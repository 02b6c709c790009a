"""Module A: from what is sensed in one tick to what is believed.

Two memories feed the belief. A map memory keeps the code of every cell that was ever in view and,
of cells out of view, the cue by which somebody showed that there is a place, or else that somebody
was seen to have it in view; a learned table turns
it into a distribution over cells for each affordance, whose moments are the first 2F dimensions of
the Gaussian belief; from it also follows where most is left to be seen, the next LOOK. A GRU over
the encoded view (CNN) and the agent's own state and public cues (MLP) gives the rest, the latent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.frontier import LOOKED_AT, cell_at, where_to_look
from hamlet.modules.contracts import (
    LOOK,
    OFFSET_UNIT,
    PLACE_STD_MIN,
    BeliefDistribution,
    RawObservation,
    TownShape,
)
from hamlet.moving import constant

LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0
LOCATION_SCALE = 60.0  # certainty needs log-odds of 10 to 20: far for steps of a few thousandths


class Perception(nn.Module):
    """One tick of perception.

    Args:
        shape: sizes of the town.
        hidden: width of the GRU.
        latent: L, dimensions of the belief beyond those that follow from the map memory.
    """

    powers_word: Tensor
    powers_source: Tensor
    powers_unit: Tensor
    powers_mask: Tensor
    telling_code: Tensor
    corner: Tensor
    rows_seen: Tensor
    columns_seen: Tensor
    view_cell: Tensor
    view_source: Tensor
    map_at: Tensor
    places_at: Tensor
    is_x: Tensor
    cached_odds: Tensor | None

    def __init__(self, shape: TownShape, hidden: int, latent: int) -> None:
        super().__init__()
        self.shape, self.hidden, self.latent = shape, hidden, latent
        view_x, view_y = view_offsets(shape.vision)
        m, c = shape.num_others, shape.num_cues
        self.cell_embedding = nn.Embedding(shape.num_cell_codes, 8)
        self.view_encoder = nn.Sequential(nn.Linear(len(view_x) * 9, 96), nn.ReLU())
        self.self_encoder = nn.Sequential(nn.Linear(shape.self_dim + m * (c + 3), 64), nn.ReLU())
        self.gru = nn.GRUCell(96 + 64, hidden)
        self.to_latent = nn.Linear(hidden, 2 * latent)
        # Log-odds that a cell with this remembered code (0 = nothing known) holds each affordance.
        self.looked_at = shape.num_cell_codes + 1
        codes = 1 + self.looked_at + len(shape.telling_cues)
        self.location_table = nn.Embedding(codes, shape.num_affordances)
        nn.init.zeros_(self.location_table.weight)
        cells = torch.arange(shape.num_cells)
        x, y = cells % shape.width, cells // shape.width
        powers = torch.stack([torch.ones_like(x), x, y, x.square(), y.square()])
        for name, value in packed(powers)._asdict().items():
            self.register_buffer(f"powers_{name}", value, persistent=False)
        code = torch.zeros(c)  # in the map memory, of each cue that tells of a place
        for rank, cue in enumerate(shape.telling_cues):
            code[cue] = self.looked_at + 1 + rank
        self.register_buffer("telling_code", code, persistent=False)
        size = torch.tensor([shape.width, shape.height])
        self.register_buffer("corner", size - 1, persistent=False)
        # Of somebody in each row the rows that it sees, and so of the columns.
        for name, length in (("rows_seen", shape.height), ("columns_seen", shape.width)):
            each = torch.arange(length)
            near = (each.unsqueeze(1) - each).abs() <= shape.vision
            self.register_buffer(name, near.float(), persistent=False)
        # Of an agent in each cell: where each cell of its view lies on the map, and the cell of the
        # view that is written there. For one beyond the map's edge that is its own, once more.
        column, row = x.unsqueeze(1) + view_x, y.unsqueeze(1) + view_y
        on_map = (column >= 0) & (column < shape.width) & (row >= 0) & (row < shape.height)
        view_cell = torch.where(on_map, row * shape.width + column, cells.unsqueeze(1))
        view_source = torch.where(on_map, torch.arange(len(view_x)), len(view_x) // 2)
        self.register_buffer("view_cell", view_cell, persistent=False)
        self.register_buffer("view_source", view_source, persistent=False)
        # Of every cell, where it is, in map sizes; and in cells, once for each affordance.
        at = torch.stack([x, y], 1)
        self.register_buffer("map_at", at / size, persistent=False)
        places_at = at.repeat(1, shape.num_affordances).double()
        self.register_buffer("places_at", places_at, persistent=False)
        is_x = torch.tensor([True, False]).repeat(shape.num_affordances)
        self.register_buffer("is_x", is_x, persistent=False)
        self.register_buffer("cached_odds", None, persistent=False)

    @property
    def belief_dim(self) -> int:
        return 2 * self.shape.num_affordances + LOOK + self.latent

    @property
    def recurrent_dim(self) -> int:
        return self.hidden + self.shape.num_cells

    def position(self, self_state: Tensor) -> Tensor:
        """int64 [., 2]: the agent's column and row, from its self-state; on the map whatever a
        client says."""
        at, last = self.shape.num_meters, self.corner
        place = (self_state[:, at : at + 2] * last).round().long()
        return place.clamp(torch.zeros_like(last), last)

    def cell_of(self, self_state: Tensor) -> Tensor:
        """int64 [.]: the agent's cell, row * width + column."""
        return cell_at(self.position(self_state), self.shape.width)

    def update_map(self, view: Tensor, self_state: Tensor, memory: Tensor) -> Tensor:
        """Write the view into the map memory [., cells] (see `BeliefDistribution`)."""
        at = self.cell_of(self_state)
        seen = view.flatten(1).to(memory.dtype) + 1
        cell, source = self.view_cell.index_select(0, at), self.view_source.index_select(0, at)
        return memory.scatter(1, cell, seen.gather(1, source))

    def update_map_from_looks(
        self, self_state: Tensor, visible: Tensor, others_offset: Tensor, memory: Tensor
    ) -> Tensor:
        """Write into the map memory which cells, of which nothing is known, the others see.

        Args:
            self_state: float32 [., K]; visible: bool [., M]; others_offset: float32 [., M, 2];
            memory: float32 [., cells].
        """
        if not self.shape.num_others:
            return memory
        away = (others_offset * OFFSET_UNIT).round().long()
        column, row = (self.position(self_state).unsqueeze(1) + away).unbind(-1)
        rows = F.embedding(row.clamp(0, self.shape.height - 1), self.rows_seen)
        columns = F.embedding(column.clamp(0, self.shape.width - 1), self.columns_seen)
        rows = rows * visible.unsqueeze(-1).to(rows.dtype)
        seen = (rows.transpose(1, 2) @ columns).flatten(1)  # whole numbers: exact
        return torch.where((memory == 0) & (seen > 0), float(self.looked_at), memory)

    def update_map_from_cues(
        self, self_state: Tensor, cues: Tensor, others_offset: Tensor, memory: Tensor
    ) -> Tensor:
        """Write into the map memory what the others' cues tell of cells that were never in view.

        Args:
            self_state: float32 [., K]; cues: float32 [., M, C], zero where nobody is visible;
            others_offset: float32 [., M, 2]; memory: float32 [., cells].
        """
        if not self.shape.telling_cues or not self.shape.num_others:
            return memory
        told = torch.where(cues > 0.5, self.telling_code, 0.0).amax(-1)
        away = (others_offset * OFFSET_UNIT).round().long()
        cell = self.position(self_state).unsqueeze(1) + away
        nearest = cell.clamp(torch.zeros_like(self.corner), self.corner)
        index = cell_at(nearest, self.shape.width)
        before = memory.gather(1, index)
        never_seen = (before == 0) | (before > self.shape.num_cell_codes)
        # What is known as well already, or from a cue that tells it better, stays.
        heard = torch.where(never_seen & (nearest == cell).all(-1), told, 0.0)
        return memory.scatter_reduce(1, index, heard, "amax")

    def odds(self) -> Tensor:
        """float64 [codes, 2F] the odds of a cell with this remembered code against the likeliest,
        each twice: for x and for y."""
        table = self.location_table.weight * LOCATION_SCALE
        odds = (table - table.amax(0)).clamp_min(-60).exp()
        return odds.repeat_interleave(2, 1).double()

    def cache_odds(self) -> None:
        """Work out, once, what follows from the weights alone: they will not change any more."""
        self.cached_odds = self.odds().detach()

    def location_logits(self, memory: Tensor) -> Tensor:
        """[., cells, F] log-odds of each affordance being in each cell, given the map memory."""
        return self.location_table(memory.long()) * LOCATION_SCALE

    def forward(
        self,
        view: Tensor,
        occupancy: Tensor,
        self_state: Tensor,
        cues: Tensor,
        visible: Tensor,
        others_offset: Tensor,
        recurrent_state: Tensor,
    ) -> BeliefDistribution:
        """Perceive one tick; fields as in `RawObservation`, [., R] state in and out."""
        hidden, memory = recurrent_state.split([self.hidden, self.shape.num_cells], dim=1)
        memory = self.update_map(view, self_state, memory)
        memory = self.update_map_from_looks(self_state, visible, others_offset, memory)
        memory = self.update_map_from_cues(self_state, cues, others_offset, memory)
        hidden = self.gru(
            self.encode(view, occupancy, self_state, cues, visible, others_offset), hidden
        )
        mean, log_std = self.believe(hidden, memory, self_state)
        return BeliefDistribution(
            mean=mean,
            log_std=log_std,
            known_state=self_state.clone(),  # an exported output may not alias an input
            social_cues=cues.clone(),
            recurrent_state=torch.cat([hidden, memory], 1),
        )

    def encode(
        self,
        view: Tensor,
        occupancy: Tensor,
        self_state: Tensor,
        cues: Tensor,
        visible: Tensor,
        others_offset: Tensor,
    ) -> Tensor:
        """[., 160] everything sensed in one tick, as input of the GRU."""
        embedded = self.cell_embedding(view.long())
        cells = torch.cat([embedded, occupancy.unsqueeze(-1).to(embedded.dtype)], dim=-1)
        others = torch.cat([cues, others_offset, visible.unsqueeze(-1).to(cues.dtype)], dim=-1)
        own = torch.cat([self_state, others.flatten(1)], 1)
        return torch.cat([self.view_encoder(cells.flatten(1)), self.self_encoder(own)], 1)

    def believe(self, hidden: Tensor, memory: Tensor, self_state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log_std [., D] from the two memories."""
        latent_mean, latent_log_std = self.to_latent(hidden).chunk(2, dim=1)
        place_mean, place_log_std = self.place_moments(memory, self_state)
        look = self.look(memory, self_state)
        known_log_std = F.pad(place_log_std, (0, LOOK), value=LOG_STD_MIN)
        log_std = torch.cat([known_log_std, latent_log_std], 1)
        mean = torch.cat([place_mean, look, latent_mean], 1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def look(self, memory: Tensor, self_state: Tensor) -> Tensor:
        """float32 [., LOOK] the ways to where most can be newly seen, and to where most can be that
        nobody was seen to look at, in map sizes; and the share of the map that was neither seen nor
        told of."""
        unknown, looked_at = ((memory == code).to(memory.dtype) for code in (0, self.looked_at))
        unseen = unknown + looked_at
        both = torch.stack([unseen, unknown + LOOKED_AT * looked_at], 1)
        cells = both.unflatten(2, (self.shape.height, self.shape.width))
        position = self.position(self_state).unsqueeze(1).expand(-1, 2, -1)
        best = where_to_look(cells, position, self.shape.vision)
        here = self.map_at.index_select(0, self.cell_of(self_state))
        ways = self.map_at.index_select(0, best.flatten()).unflatten(0, best.shape)
        return torch.cat([(ways - here.unsqueeze(1)).flatten(1), unseen.mean(1, True)], 1)

    def sequence(
        self, obs: RawObservation, first: Tensor, recurrent_state: Tensor, ticks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """T ticks at once, as `forward` tick by tick but with everything batched that can be.

        Args:
            obs: fields [T, S, ...]; first: bool [T, S], a new life begins at this tick;
            recurrent_state: [S, R]; ticks: int64 [U] of the T ticks, those whose belief is asked
            for.

        Returns:
            mean and log_std [U, S, D], location logits [U, S, cells, F], state [S, R].
        """
        flat = RawObservation(*(x.flatten(0, 1) for x in obs))
        encoded = self.encode(
            flat.view, flat.occupancy, flat.self_state, flat.cues, flat.visible, flat.others_offset
        ).unflatten(0, (len(first), -1))
        hidden, memory = recurrent_state.split([self.hidden, self.shape.num_cells], dim=1)
        hiddens, memories = [], []
        for t in range(len(first)):
            going = ~first[t].unsqueeze(-1)
            memory = self.update_map(obs.view[t], obs.self_state[t], memory * going)
            memory = self.update_map_from_looks(
                obs.self_state[t], obs.visible[t], obs.others_offset[t], memory
            )
            memory = self.update_map_from_cues(
                obs.self_state[t], obs.cues[t], obs.others_offset[t], memory
            )
            hidden = self.gru(encoded[t], hidden * going)
            hiddens.append(hidden)
            memories.append(memory)
        remembered = torch.stack(memories)[ticks].flatten(0, 1)
        mean, log_std = self.believe(
            torch.stack(hiddens)[ticks].flatten(0, 1),
            remembered,
            obs.self_state[ticks].flatten(0, 1),
        )
        shape = (len(ticks), -1)
        return (
            mean.unflatten(0, shape),
            log_std.unflatten(0, shape),
            self.location_logits(remembered).unflatten(0, shape),
            torch.cat([hidden, memory], 1),
        )

    def place_moments(self, memory: Tensor, self_state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log_std [., 2F] of each affordance's offset from the agent, in map sizes.

        The softmax over cells of `location_logits` and its moments, without a softmax: how many
        cells there are with each code, and the sums of their x, y, x^2 and y^2, are weighed by the
        odds of the code. All but the odds are whole numbers, added up several in one (`packed`).
        """
        odds = self.odds() if self.cached_odds is None else self.cached_odds
        code = memory.long()
        words = [
            code.new_zeros(code.shape[0], len(odds)).scatter_add(1, code, word.expand_as(code))
            for word in self.powers_word
        ]
        found = torch.stack(words, 1).index_select(1, self.powers_source) & self.powers_mask
        # In double precision: a variance is the difference of nearly equal numbers, and what is
        # lost here would come back enlarged as a difference between PyTorch and ONNX Runtime.
        sums = (found.double() * self.powers_unit) @ odds
        count, x, y, x_square, y_square = sums.flatten(1).chunk(5, 1)  # each [., 2F]
        each = count.reciprocal()
        mean = torch.where(self.is_x, x, y) * each
        square = torch.where(self.is_x, x_square, y_square) * each
        variance = (square - mean.square()).clamp_min(0).float()
        here = self.places_at.index_select(0, self.cell_of(self_state))
        unit = torch.where(self.is_x, 1 / self.shape.width, 1 / self.shape.height)
        log_std = 0.5 * (variance * unit.square() + PLACE_STD_MIN**2).log()
        return (mean - here).float() * unit, log_std


def view_offsets(vision: int) -> tuple[Tensor, Tensor]:
    """int64 [S * S], [S * S]: how far right and down each cell of the view is, row by row."""
    side = 2 * vision + 1
    in_view = torch.arange(side * side)
    return in_view % side - vision, in_view // side - vision


class Packed(NamedTuple):
    """Several small sums in one addition: rows of numbers side by side in the bits of others."""

    word: Tensor
    """int64 [W, n] what to add up."""
    source: Tensor
    """int64 [P] in which of the W sums the sum of each row is."""
    mask: Tensor
    """int64 [P, 1] the bits of it that are the row's, and"""
    unit: Tensor
    """float64 [P, 1] what to multiply these by."""


def packed(rows: Tensor) -> Packed:
    """Pack `rows` int64 [P, n], not negative, for sums of any of their columns."""
    words, source, mask, unit, used = [torch.zeros_like(rows[0])], [], [], [], 0
    for row in rows:
        bits = int(row.sum()).bit_length()
        if used + bits > 63:
            words, used = [*words, torch.zeros_like(row)], 0
        words[-1] = words[-1] + (row << used)
        source.append(len(words) - 1)
        mask.append([(2**bits - 1) << used])
        unit.append([2.0**-used])
        used += bits
    units = torch.tensor(unit, dtype=torch.float64)
    return Packed(torch.stack(words), torch.tensor(source), torch.tensor(mask), units)


class PerceptionHeads(nn.Module):
    """Decoders that teach the belief and show what is in it; they are not part of the frozen graph.

    From a sample of the belief and the known state: this tick's view and occupancy, the next tick's
    view given the action, and the (hidden) meters of the other agents. A view is drawn by placing
    every affordance where the belief has it; for the next one everything shifts by a learned step.
    """

    view_cells: Tensor

    def __init__(self, shape: TownShape, belief_dim: int, width: int = 128) -> None:
        super().__init__()
        self.shape = shape
        known = belief_dim + shape.self_dim
        cells = torch.stack(view_offsets(shape.vision), -1).float()
        view = len(cells)

        def decoder(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))

        self.background = decoder(known + 2, view * 2)  # empty ground or outside the map
        self.sharpness = nn.Parameter(torch.tensor(8.0))
        self.step = nn.Embedding(shape.num_actions, 2)
        nn.init.zeros_(self.step.weight)  # begin with: nothing moves
        self.succeeds = decoder(known + shape.num_actions, 1)
        self.occupancy = decoder(known, view)
        others = shape.num_others * shape.num_meters
        self.others_meters = decoder(known, others) if others else None
        self.register_buffer("view_cells", cells, persistent=False)

    def draw(self, belief: Tensor, known: Tensor, step: Tensor) -> Tensor:
        """View logits [., S * S, V] after moving by `step` [., 2] cells."""
        size = constant((self.shape.width, self.shape.height), belief.dtype, belief.device)
        places = belief[..., : 2 * self.shape.num_affordances].unflatten(-1, (-1, 2)) * size
        distance = self.view_cells[:, None] - (places - step.unsqueeze(-2)).unsqueeze(-3)
        there = (-2 * distance.square().sum(-1)).exp() * self.sharpness * 2 - self.sharpness
        ground = self.background(torch.cat([belief, known, step], -1)).unflatten(-1, (-1, 2))
        return torch.cat([ground[..., :1], there, ground[..., 1:]], -1)

    def forward(
        self, belief: Tensor, known: Tensor, action: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """belief [., D] sample, known [., K], action int64 [.] -> view logits [., S * S, V],
        occupancy logits [., S * S], next view logits [., S * S, V], other agents' meters
        [., M, N]."""
        both = torch.cat([belief, known], -1)
        chosen = F.one_hot(action, self.shape.num_actions).float()
        succeeds = self.succeeds(torch.cat([both, chosen], -1)).sigmoid()
        step = 8 * succeeds * self.step(action)
        meters = self.others_meters(both) if self.others_meters is not None else both[..., :0]
        return (
            self.draw(belief, known, torch.zeros_like(step)),
            self.occupancy(both),
            self.draw(belief, known, step),
            meters.unflatten(-1, (self.shape.num_others, self.shape.num_meters)),
        )
