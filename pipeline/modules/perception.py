"""Module A: from what is sensed in one tick to what is believed.

Two memories feed the belief. A map memory keeps the code of every cell that was ever in view; a
learned table turns it into a distribution over cells for each affordance, whose moments are the
first 2F dimensions of the Gaussian belief. A GRU over the encoded view (CNN) and the agent's own
state and public cues (MLP) gives the rest, the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pipeline.modules.contracts import METERS, BeliefDistribution, RawObservation, TownShape

LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0


class Perception(nn.Module):
    """One tick of perception.

    Args:
        shape: sizes of the town.
        hidden: width of the GRU.
        latent: L, dimensions of the belief beyond the 2F of the affordances' places.
    """

    cell_x: Tensor
    cell_y: Tensor

    def __init__(self, shape: TownShape, hidden: int, latent: int) -> None:
        super().__init__()
        self.shape, self.hidden, self.latent = shape, hidden, latent
        m, c = shape.num_others, shape.num_cues
        self.cell_embedding = nn.Embedding(shape.num_cell_codes, 8)
        self.view_encoder = nn.Sequential(
            nn.Conv2d(9, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()
        )
        self.self_encoder = nn.Sequential(nn.Linear(shape.self_dim + m * (c + 3), 64), nn.ReLU())
        self.gru = nn.GRUCell(9 * 16 + 64, hidden)
        self.to_latent = nn.Linear(hidden, 2 * latent)
        # Log-odds that a cell with this remembered code (0 = never seen) holds each affordance.
        self.location_table = nn.Embedding(shape.num_cell_codes + 1, shape.num_affordances)
        cells = torch.arange(shape.num_cells)
        self.register_buffer("cell_x", cells % shape.width, persistent=False)
        self.register_buffer("cell_y", cells // shape.width, persistent=False)

    @property
    def belief_dim(self) -> int:
        return 2 * self.shape.num_affordances + self.latent

    @property
    def recurrent_dim(self) -> int:
        return self.hidden + self.shape.num_cells

    def position(self, self_state: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [.], [.]: the agent's column and row, from its self-state."""
        x = (self_state[:, METERS] * (self.shape.width - 1)).round().long()
        y = (self_state[:, METERS + 1] * (self.shape.height - 1)).round().long()
        return x, y

    def remember(self, view: Tensor, self_state: Tensor, memory: Tensor) -> Tensor:
        """Write the view into the map memory [., cells] (0 never seen, else cell code + 1)."""
        x, y = self.position(self_state)
        column = self.cell_x - x[:, None] + 2
        row = self.cell_y - y[:, None] + 2
        in_view = (column >= 0) & (column < 5) & (row >= 0) & (row < 5)
        index = row.clamp(0, 4) * 5 + column.clamp(0, 4)
        seen = view.flatten(1).long().gather(1, index).to(memory.dtype) + 1
        return torch.where(in_view, seen, memory)

    def location_logits(self, memory: Tensor) -> Tensor:
        """[., cells, F] log-odds of each affordance being in each cell, given the map memory."""
        return self.location_table(memory.long())

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
        memory = self.remember(view, self_state, memory)
        hidden = self.gru(
            self.encode(view, occupancy, self_state, cues, visible, others_offset), hidden
        )
        mean, log_std = self.believe(hidden, self.location_logits(memory), self_state)
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
        """[., 208] everything sensed in one tick, as input of the GRU."""
        embedded = self.cell_embedding(view.long()).permute(0, 3, 1, 2)
        pixels = torch.cat([embedded, occupancy.unsqueeze(1).to(embedded.dtype)], dim=1)
        others = torch.cat([cues, others_offset, visible.unsqueeze(-1).to(cues.dtype)], dim=-1)
        own = torch.cat([self_state, others.flatten(1)], 1)
        return torch.cat([self.view_encoder(pixels), self.self_encoder(own)], 1)

    def believe(
        self, hidden: Tensor, location_logits: Tensor, self_state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and log_std [., D] from the two memories."""
        latent_mean, latent_log_std = self.to_latent(hidden).chunk(2, dim=1)
        place_mean, place_log_std = self.place_moments(location_logits, self_state)
        log_std = torch.cat([place_log_std, latent_log_std], 1).clamp(LOG_STD_MIN, LOG_STD_MAX)
        return torch.cat([place_mean, latent_mean], 1), log_std

    def sequence(
        self, obs: RawObservation, first: Tensor, recurrent_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """T ticks at once, as `forward` tick by tick but with everything batched that can be.

        Args:
            obs: fields [T, S, ...]; first: bool [T, S], a new life begins at this tick;
            recurrent_state: [S, R].

        Returns:
            mean and log_std [T, S, D], location logits [T, S, cells, F], state [S, R].
        """
        ticks = first.shape[0]
        flat = RawObservation(*(x.flatten(0, 1) for x in obs))
        encoded = self.encode(
            flat.view, flat.occupancy, flat.self_state, flat.cues, flat.visible, flat.others_offset
        ).unflatten(0, (ticks, -1))
        hidden, memory = recurrent_state.split([self.hidden, self.shape.num_cells], dim=1)
        hiddens, memories = [], []
        for t in range(ticks):
            going = ~first[t].unsqueeze(-1)
            memory = self.remember(obs.view[t], obs.self_state[t], memory * going)
            hidden = self.gru(encoded[t], hidden * going)
            hiddens.append(hidden)
            memories.append(memory)
        logits = self.location_logits(torch.stack(memories).flatten(0, 1))
        mean, log_std = self.believe(torch.stack(hiddens).flatten(0, 1), logits, flat.self_state)
        shape = (ticks, -1)
        return (
            mean.unflatten(0, shape),
            log_std.unflatten(0, shape),
            logits.unflatten(0, shape),
            torch.cat([hidden, memory], 1),
        )

    def place_moments(self, logits: Tensor, self_state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log_std [., 2F] of each affordance's offset from the agent, in map sizes."""
        probability = logits.softmax(dim=1)
        coordinates = torch.stack([self.cell_x, self.cell_y], -1).to(probability.dtype)
        mean = torch.einsum("bcf,cd->bfd", probability, coordinates)
        square = torch.einsum("bcf,cd->bfd", probability, coordinates.square())
        std = (square - mean.square()).clamp_min(0).sqrt()
        size = coordinates.new_tensor([self.shape.width, self.shape.height])
        position = torch.stack(self.position(self_state), -1).to(mean.dtype).unsqueeze(1)
        offset = (mean - position) / size
        return offset.flatten(1), (std / size + 0.01).log().flatten(1)


class PerceptionHeads(nn.Module):
    """Decoders that teach the belief and show what is in it; they are not part of the frozen graph.

    From a sample of the belief: this tick's view and occupancy, the next tick's view given the
    action, and the (hidden) meters of the other agents.
    """

    def __init__(self, shape: TownShape, belief_dim: int, width: int = 128) -> None:
        super().__init__()
        self.shape = shape
        cells = 25 * shape.num_cell_codes

        def decoder(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))

        self.view = decoder(belief_dim, cells)
        self.occupancy = decoder(belief_dim, 25)
        self.next_view = decoder(belief_dim + shape.num_actions, cells)
        self.others_meters = decoder(belief_dim, shape.num_others * METERS)

    def forward(self, belief: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """belief [., D] sample, action int64 [.] -> view logits [., 25, V], occupancy logits
        [., 25], next view logits [., 25, V], other agents' meters [., M, 8]."""
        v, m = self.shape.num_cell_codes, self.shape.num_others
        with_action = torch.cat([belief, F.one_hot(action, self.shape.num_actions).float()], dim=-1)
        return (
            self.view(belief).unflatten(-1, (25, v)),
            self.occupancy(belief),
            self.next_view(with_action).unflatten(-1, (25, v)),
            self.others_meters(belief).unflatten(-1, (m, METERS)),
        )
