"""A mind that was never trained, exported as the stage `agent` does it."""

from __future__ import annotations

from pathlib import Path


def untrained(town):
    """A whole mind for a town with random weights, and what its agents see, by name."""
    import torch

    from hamlet.modules.agent import AgentState, Mind
    from hamlet.modules.contracts import RawObservation, TownShape, observation_from
    from hamlet.modules.perception import Perception
    from hamlet.modules.policy import Policy
    from hamlet.modules.social import Social
    from hamlet.modules.world_model import WorldModel
    from hamlet.serving.agent import STATE
    from hamlet.town.tables import menu, timetable
    from stages.agent import blank

    torch.manual_seed(3)
    torch.set_num_threads(1)
    shape = TownShape.of(town)
    n = shape.num_meters
    perception, targets = Perception(shape, 16, 8), torch.zeros(shape.num_goals, n)
    targets[torch.arange(n), torch.arange(n)] = 0.9
    told = targets, timetable(town.pack), menu(town.pack)
    policy = Policy(shape, perception.belief_dim, 32, *told, 4, 0.2)
    torch.nn.init.normal_(policy.future_weight[-1].weight, std=2.0)  # imagination matters
    torch.nn.init.normal_(perception.location_table.weight, std=0.1)
    social = Social(shape, 16)
    mind = Mind(perception, WorldModel(shape, 8, 32, 2), social, policy, candidates=2, horizon=1)
    mind.requires_grad_(False).eval()
    state = blank(4, perception.recurrent_dim, shape.num_others, social.recurrent_dim, n)
    obs = observation_from(town.observe(town.reset(1, 4 // shape.num_agents)), 2)
    names = [*RawObservation._fields, *(STATE + name for name in AgentState._fields)]
    return mind, dict(zip(names, [*obs, *state], strict=True))


def export(module, inputs, shape, path: Path, pack: str = "l4_contention") -> None:
    from hamlet.artifacts import write_card
    from hamlet.export.frozen import tensor_schema
    from hamlet.export.onnx import OPSET, export_mind
    from hamlet.modules.contracts import SOCIAL_REASONS, UNCERTAINTY_REASONS
    from hamlet.town import load_pack
    from stages.agent import OUTPUTS, limits

    export_mind(module, inputs, OUTPUTS, path)
    schema = {
        "inputs": tensor_schema(list(inputs), list(inputs.values())),
        "outputs": tensor_schema(OUTPUTS, module(*inputs.values())),
    }
    reasons = {"uncertainty": list(UNCERTAINTY_REASONS), "social": list(SOCIAL_REASONS)}
    extra = {
        "town": shape.to_dict(), "resolved_pack": load_pack(pack).model_dump(mode="json"),
        "opset": OPSET, "limits": limits(shape), "reasons": reasons,
    }  # fmt: skip
    write_card(path, "agent", schema, {}, shape.pack_hash, extra)
