"""population: the agent goes on learning among strangers; the best of its selves is kept.

First of all the policy is compared with what it was when imitation ended (`stages.reinforced`).

Round by round a new member starts from the last one and learns by PPO in worlds that it shares with
scripted characters and with frozen past selves. The characters evolve, a generation a round, by how
they fare beside the newest member. In the end all members meet in pairs, and among the characters
of training; who does best there on the average is the winner, of whom the agent is made: the first
member, the policy as it came, if nobody is better. Last, it is measured where nothing was chosen:
one of its kind among held-out characters, on held-out maps.

Without rounds the policy is the winner.
"""

from __future__ import annotations

import shutil
from typing import Any

from hamlet.artifacts import atomic_dir, check_card, write_json
from stages import paths
from stages.common import stage
from stages.paths import home
from stages.reinforced import reinforced
from stages.society import raised


def main() -> None:
    with stage("population") as s:
        rounds = s.params.population.rounds
        folder = s.checkpoint_dir(
            "pipeline", extra=check_card(paths.POLICY / "weights.pt")["sha256"]
        )
        for module in (paths.PERCEPTION, paths.WORLD_MODEL, paths.SOCIAL, paths.SENSE):
            check_card(module)  # what the policy stands on is as it was made
        shutil.copytree(paths.POLICY, home(folder, 0), dirs_exist_ok=True)
        numbers: dict[str, Any] = reinforced(s.params, s.device) | {"winner": 0}
        if rounds:
            numbers |= raised(s, folder)
        write_json(paths.metrics("population"), numbers)
        s.run.metrics({k: v for k, v in numbers.items() if isinstance(v, int | float)})
        with atomic_dir(paths.WINNER) as fresh:
            shutil.copytree(home(folder, numbers["winner"]), fresh, dirs_exist_ok=True)
        with atomic_dir(paths.POPULATION) as fresh:
            for number in range(rounds + 1):
                shutil.copytree(home(folder, number), fresh / home(folder, number).name)


if __name__ == "__main__":
    main()
