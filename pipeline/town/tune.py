"""Tune a pack's expert by the cross-entropy method and freeze it in the pack.

    python -m hamlet.town.tune PACK.yaml [--generations 30] [--candidates 32] [--worlds 32]

Each expert (`--experts`) starts from the parameters it plays by now and is tuned with the knowledge
that it has. Every candidate plays the same worlds (same layouts, starts and ties), four or more
lives each; the best quarter moves the mean and the spread of the next generation (Rubinstein 1999).
The result is measured on layouts that tuning never saw and written into the `experts` section,
which must be the last of the file. An interrupt writes the best mean so far. A parameter that is 0
stays 0: give `foresight` a value in the pack to have it tuned, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import yaml
from rich.progress import Progress
from torch import Tensor

from hamlet.town import personalities
from hamlet.town.lives import HELD_OUT_LAYOUTS, play
from hamlet.town.load import load_pack
from hamlet.town.players import Scripted
from hamlet.town.schema import ExpertSettings, Pack, PackError
from hamlet.town.town import Town

ADDITIVE = {"rest_bonus": 0.01}  # spread of parameters that may be negative
NOTE = "# Found by `python -m hamlet.town.tune`; mean return of a life on layouts tuning never saw."


def tune(
    pack: Pack,
    start: dict[str, float],
    fixed: dict[str, float],
    generations: int,
    candidates: int,
    worlds: int,
    seed: int,
    alone_weight: float,
    progress: Progress | None = None,
    spread: float = 0.35,
    name: str = "expert",
) -> dict[str, float]:
    """Parameters with the highest mean return found; see the module docstring.

    `name` is the expert whose knowledge the candidates have. What starts at 0 stays 0 (all but
    `rest_bonus` is tuned by its logarithm), and what `fixed` names stays what it says.
    """
    names = personalities.parameter_names(pack)
    town = Town(pack, layout_seed=seed)
    lone = Town(pack.model_copy(update={"agents": 1}), layout_seed=seed)
    additive = torch.tensor([name in ADDITIVE for name in names])
    start = start | fixed
    held = torch.tensor([n in fixed or (n not in ADDITIVE and start[n] == 0.0) for n in names])
    mean = torch.tensor([start[n] if n in ADDITIVE else max(start[n], 1e-4) for n in names])
    mean = torch.where(additive, mean, mean.clamp(min=1e-6).log())
    deviation = torch.tensor([ADDITIVE.get(n, spread if "comfort" not in n else spread / 2)
                              for n in names])  # fmt: skip
    deviation[held] = 0.0
    exact = torch.tensor([start[n] for n in names])
    generator = torch.Generator().manual_seed(seed)
    limit = torch.tensor([0.95 if n.startswith("comfort") else 1e6 for n in names])
    task = progress.add_task("tuning", total=generations) if progress else None

    def decode(rows: Tensor) -> Tensor:
        values = torch.where(additive, rows, rows.exp()).minimum(limit)
        return torch.where(held, exact, values)

    try:
        for generation in range(generations):
            noise = torch.randn(candidates, len(names), generator=generator)
            rows = mean + deviation * noise
            rows[0] = mean
            table = decode(rows)
            score = torch.zeros(candidates)
            for world, weight in ((town, 1.0 - alone_weight), (lone, alone_weight)):
                if weight:
                    players = Scripted.from_parameters(world, table, name)
                    count = worlds if world is town else worlds * town.num_agents // 2
                    result = play(world, players, seed + generation, count, candidates)
                    score += weight * result["returns"].mean((0, 2))
            elite = rows[score.topk(max(2, candidates // 4)).indices]
            mean = 0.3 * mean + 0.7 * elite.mean(0)
            deviation = 0.3 * deviation + 0.7 * elite.std(0)
            deviation[held] = 0.0
            if progress and task is not None:
                text = f"mean {score[0]:.1f} best {score.max():.1f}"
                progress.update(task, advance=1, description=text)
                progress.console.print(f"generation {generation}: {text}")
    except KeyboardInterrupt:
        print("interrupted: keeping the mean so far", file=sys.stderr)
    values = decode(mean[None])[0].tolist()
    return {n: float(f"{v:.4g}") for n, v in zip(names, values, strict=True)}


def measure(pack: Pack, name: str, worlds: int, seed: int) -> dict[str, float]:
    """Mean return of a character, contended and alone, on layouts no tuning has seen."""
    found = {}
    for label, agents in (("contended", pack.agents), ("alone", 1)):
        town = Town(pack.model_copy(update={"agents": agents}), layout_seed=HELD_OUT_LAYOUTS)
        returns = play(town, Scripted(town, [name]), seed, worlds)["returns"]
        found[label] = round(returns.mean().item(), 2)
    return found


def write_experts(path: Path, experts: dict[str, dict]) -> None:
    """Replace the pack's last section, keeping everything before it as it is."""
    head = path.read_text(encoding="utf-8").split("\nexperts:")[0].rstrip()
    head = head.removesuffix(NOTE).rstrip()
    lines = [NOTE, "experts:"]
    for name, settings in experts.items():
        lines.append(f"  {name}:")
        lines += [f"    {k}: {v}" for k, v in settings.items() if k != "parameters"]
        if "parameters" in settings:
            lines.append("    parameters:")
            lines += [f"      {k}: {v}" for k, v in settings["parameters"].items()]
    temporary = path.with_suffix(".tmp")
    temporary.write_text(head + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path, help="pack file; its `experts` section is rewritten")
    parser.add_argument("--generations", type=int, default=30)
    parser.add_argument("--candidates", type=int, default=32)
    parser.add_argument("--worlds", type=int, default=32, help="worlds per candidate")
    parser.add_argument("--alone-weight", type=float, default=0.25, help="weight of lone lives")
    parser.add_argument("--experts", default="expert,expert_ignoring", help="whom to tune")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    names = args.experts.split(",")
    try:
        pack = load_pack(args.pack)
    except PackError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    unknown = [name for name in names if name not in personalities.EXPERTS]
    if unknown:
        known = ", ".join(personalities.EXPERTS)
        print(f"tune: --experts: no expert {unknown[0]!r}; use some of {known}", file=sys.stderr)
        return 2
    experts: dict[str, dict] = yaml.safe_load(args.pack.read_text()).get("experts") or {}
    with Progress() as progress:
        for name in names:
            ignoring = name.endswith("_ignoring")
            if ignoring and pack.agents == 1:
                continue
            found = tune(
                pack, personalities.parameters(pack, name),
                personalities.IGNORING if ignoring else {},
                args.generations, args.candidates, args.worlds, args.seed,
                args.alone_weight if pack.agents > 1 else 0.0, progress, name=name,
            )  # fmt: skip
            experts[name] = {"parameters": found}
            pack = pack.model_copy(update={"experts": load_settings(pack, experts)})
            experts[name] = measure(pack, name, 256, args.seed) | experts[name]
    write_experts(args.pack, experts)
    load_pack(args.pack)
    print({name: {k: v for k, v in e.items() if k != "parameters"} for name, e in experts.items()})
    return 0


def load_settings(pack: Pack, experts: dict[str, dict]) -> dict:
    """The pack's expert settings with the newly found ones on top."""
    return dict(pack.experts) | {k: ExpertSettings.model_validate(v) for k, v in experts.items()}


if __name__ == "__main__":
    sys.exit(main())
