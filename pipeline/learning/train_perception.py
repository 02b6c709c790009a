"""Train module A on recorded worlds: reconstruct, predict the next tick, place the affordances."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from hamlet.learning import distributed
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.float8 import in_precision
from hamlet.learning.log import Log
from hamlet.learning.losses import cross_entropy, weighted_means, weighted_terms
from hamlet.learning.sequences import SequenceReader, per_agent, sent
from hamlet.learning.update import Update
from hamlet.modules.contracts import RawObservation, TownShape
from hamlet.modules.perception import Perception, PerceptionHeads
from hamlet.params import PerceptionParams

IMPORTANCE = dict.fromkeys(("view", "occupancy", "next_view", "places", "others_meters"), 1.0)
"""Weights of the terms of the loss, beside that of `kl`, which is a parameter."""


def observation(chunk: TensorDict) -> RawObservation:
    return RawObservation(*(chunk[name] for name in RawObservation._fields))


def perception_loss(
    module: Perception, heads: PerceptionHeads, chunk: TensorDict, state: Tensor, kl_weight: float
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss over a chunk [T, S]; also returns the recurrent state [S, R] after it."""
    obs = observation(chunk)
    # Neighbouring ticks say nearly the same: a quarter of them teaches as much.
    now = torch.arange(0, chunk.shape[0] - 1, 4, device=state.device)
    after = now + 1
    mean, log_std, location, state = module.sequence(obs, chunk["first"], state, now)
    belief = mean + distributed.noise(mean, 1) * log_std.exp()
    weight = chunk["alive"][now].float()
    view, occupancy, next_view, meters = heads(belief, obs.self_state[now], chunk["action"][now])

    def drawn(logits: Tensor, codes: Tensor) -> Tensor:
        return cross_entropy(logits, codes.flatten(2).long()).mean(-1)

    follows = weight * (~chunk["first"][after]).float()
    place = cross_entropy(location.movedim(2, -1), chunk["places"][now].long()).mean(-1)
    wrong = (meters - chunk["others_meters"][now]).square()
    if wrong.shape[-2]:
        others_meters = wrong.mean((-1, -2))
        seen = chunk["visible"][now].float().mean(-1) * weight
    else:  # an agent that is alone
        others_meters, seen = torch.zeros_like(weight), weight
    kl = 0.5 * (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std)
    occupied = F.binary_cross_entropy_with_logits(
        occupancy, (obs.occupancy[now].flatten(2) > 0).float(), reduction="none"
    )
    parts = weighted_means(
        {
            "view": (drawn(view, obs.view[now]), weight),
            "occupancy": (occupied.mean(-1), weight),
            "next_view": (drawn(next_view, obs.view[after]), follows),
            "places": (place, weight),
            "others_meters": (others_meters, seen),
            "kl": (kl[..., -module.latent :].mean(-1), weight),
        }
    )
    parts = weighted_terms(parts, IMPORTANCE | {"kl": kl_weight})
    return torch.stack(list(parts.values())).sum(), parts, state


def train_perception(
    data: TensorDict,
    worlds: Tensor,
    shape: TownShape,
    params: PerceptionParams,
    seed: int,
    checkpoint: Path,
    log: Log,
) -> tuple[Perception, PerceptionHeads]:
    """Train on the given worlds of `data` [T, B] (see `stages/collect.py` for its fields)."""
    torch.manual_seed(seed)
    device = data["action"].device
    module = Perception(shape, params.hidden, params.latent).to(device)
    heads = PerceptionHeads(shape, module.belief_dim).to(device)
    reader = SequenceReader(
        data, worlds, params.sequences, params.chunk, torch.Generator().manual_seed(seed)
    )
    slots = (
        distributed.local_count(params.sequences, "params.yaml: perception.sequences")
        * shape.num_agents
    )
    state = torch.zeros(slots, module.recurrent_dim, device=device)

    carried: list[Tensor] = []

    def loss(chunk: TensorDict, state: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total, parts, after = perception_loss(module, heads, chunk, state, params.kl_weight)
        carried[:] = [after.detach()]
        return total, parts

    loss_to_take, precision = in_precision(loss, params.precision, module.parameters(), str(device))
    update = Update(
        loss_to_take,
        [*module.parameters(), *heads.parameters()],
        learning_rate=params.learning_rate,
        precision=precision,
    )
    saved = Checkpoint(
        checkpoint,
        {
            "module": module,
            "heads": heads,
            "update": update,
            "reader": reader,
            "rng": torch.default_generator,
        },
    )
    start, extra = saved.load()
    state = extra.get("state", state).to(device)
    for step in log.steps(params.steps, start):
        update.set_learning_rate(params.learning_rate * (1 - step / params.steps))
        metrics = update(reader.read(), state)
        state = carried[0]
        log.record(step, metrics)
        saved.save(step + 1, rows={"state": state})
    return module.eval(), heads.eval()


def decode_map(module: Perception, mean: Tensor, log_std: Tensor, self_state: Tensor) -> Tensor:
    """Probability of each cell code [., cells, F + 1] (0 empty, then affordances) from the belief.

    Each affordance's Gaussian is spread over the cells; what no affordance claims is empty.
    """
    shape = module.shape
    size = mean.new_tensor([shape.width, shape.height])
    position = module.position(self_state).float().unsqueeze(1)
    places = 2 * shape.num_affordances
    centre = mean[:, :places].unflatten(-1, (-1, 2)) * size + position
    std = log_std[:, :places].unflatten(-1, (-1, 2)).exp() * size
    cell = torch.arange(shape.num_cells, device=mean.device)
    cells = torch.stack([cell % shape.width, cell // shape.width], -1).float()
    distance = ((cells[None, :, None] - centre[:, None]) / std[:, None]).square().sum(-1)
    claimed = (-0.5 * distance).softmax(1)
    return torch.cat([(1 - claimed.sum(-1, keepdim=True)).clamp_min(0), claimed], -1)


def expected_calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """Mean gap of confidence and accuracy over equal-width bins (Guo et al. 2017, eq. 3)."""
    index = (confidence * bins).long().clamp(0, bins - 1)
    count = torch.bincount(index, minlength=bins).double()
    gap = torch.bincount(index, (confidence - correct.to(confidence.dtype)).double(), bins).abs()
    return (gap.sum() / count.sum()).item()


@torch.no_grad()
def evaluate_perception(
    module: Perception, heads: PerceptionHeads, data: TensorDict, worlds: Tensor, chunk_ticks: int
) -> dict[str, float]:
    """Held-out accuracy of what the belief holds, each beside its trivial baseline."""
    device = data["action"].device
    (worlds,) = sent((worlds,), device)
    state = torch.zeros(len(worlds) * module.shape.num_agents, module.recurrent_dim, device=device)
    sums: dict[str, float] = {}
    confidences, corrects = [], []

    def add(name: str, correct: Tensor, where: Tensor) -> None:
        sums[name] = sums.get(name, 0.0) + correct[where].double().sum().item()
        sums[f"{name}#"] = sums.get(f"{name}#", 0.0) + where.sum().item()

    for begin in range(0, data.shape[0], chunk_ticks):
        chunk = per_agent(data[begin : begin + chunk_ticks][:, worlds])
        obs = observation(chunk)
        every = torch.arange(chunk.shape[0], device=device)
        mean, log_std, _, state = module.sequence(obs, chunk["first"], state, every)
        view, _, next_view, meters = heads(mean, obs.self_state, chunk["action"])
        alive = chunk["alive"]
        codes = obs.view.flatten(2).long()
        cells = alive.unsqueeze(-1).expand_as(codes)
        add("view_accuracy", view.argmax(-1) == codes, cells)
        follows = (alive[:-1] & ~chunk["first"][1:]).unsqueeze(-1).expand_as(codes[1:])
        add("next_view_accuracy", next_view[:-1].argmax(-1) == codes[1:], follows)
        add("next_view_accuracy_persistence", codes[:-1] == codes[1:], follows)
        if module.shape.num_others:
            seen_others = chunk["visible"].unsqueeze(-1).expand_as(meters)
            add("others_meters_error", (meters - chunk["others_meters"]).abs(), seen_others)
            add("others_meters_error_mean", (0.75 - chunk["others_meters"]).abs(), seen_others)

        # The map, at the last tick of the chunk: long after some cells were last in view.
        memory = state[:, module.hidden :]
        probability = decode_map(module, mean[-1], log_std[-1], obs.self_state[-1])
        truth = torch.zeros_like(memory, dtype=torch.long)
        truth.scatter_(
            1,
            chunk["places"][-1].long(),
            torch.arange(1, module.shape.num_affordances + 1, device=device).expand(len(truth), -1),
        )
        confidence, decoded = probability.max(-1)
        in_memory = (memory > 0) & (memory <= module.shape.num_cell_codes)
        seen = in_memory & alive[-1].unsqueeze(-1)
        unseen = ~in_memory & alive[-1].unsqueeze(-1)
        add("map_seen_accuracy", decoded == truth, seen)
        add("map_unseen_accuracy", decoded == truth, unseen)
        add("map_unseen_accuracy_prior", truth == 0, unseen)
        if module.shape.num_others and module.shape.telling_cues:
            heard = (memory > module.looked_at) & alive[-1].unsqueeze(-1)
            add("map_heard_accuracy", decoded == truth, heard)
        blank = torch.zeros_like(memory)
        now = module.update_map(obs.view[-1], obs.self_state[-1], blank)
        in_view = torch.where((now > 0) & (now <= module.shape.num_affordances + 1), now - 1, 0)
        add("map_seen_accuracy_last_view", in_view.long() == truth, seen)
        confidences.append(confidence[alive[-1]].flatten())
        corrects.append((decoded == truth)[alive[-1]].flatten())
    result = {
        name: total / max(sums[f"{name}#"], 1.0)
        for name, total in sums.items()
        if not name.endswith("#")
    }
    result["map_ece"] = expected_calibration_error(
        torch.cat(confidences).cpu(), torch.cat(corrects).cpu()
    )
    return result
