"""Is a pack good to live in?

    python -m hamlet.town.validate PACK

makes all checks of a pack, and the last: a scripted expert that knows the whole map plays it and
must survive.
"""

from __future__ import annotations

import argparse
import sys

from hamlet.town.lives import play
from hamlet.town.load import load_pack
from hamlet.town.players import Scripted
from hamlet.town.schema import Pack, PackError
from hamlet.town.town import Town

SURVIVORS = 0.5  # share of expert lives that must reach the lifespan


def check_survivable(pack: Pack, source: str, worlds: int = 32, seed: int = 0) -> dict[str, float]:
    """Let an expert that knows the whole map live `worlds` lives; most must reach the lifespan.

    Returns mean `returns`, `life` (ticks) and `retired` (share). Raises PackError if too few live.
    """
    town = Town(pack, num_layouts=256)
    found = play(town, Scripted(town, ["expert"]), seed, worlds)
    means = {name: value.mean().item() for name, value in found.items()}
    if means["retired"] < SURVIVORS:
        raise PackError(
            f"{source}: pack: even an expert that knows the map lives only {means['life']:.0f} of "
            f"{pack.lifespan} ticks ({means['retired']:.0%} reach the end); soften depletion, "
            "prices or hours"
        )
    return means


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", help="pack name, YAML file or Hamlet pack directory")
    parser.add_argument("--worlds", type=int, default=32, help="worlds the expert plays")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        pack = load_pack(args.pack)
        means = check_survivable(pack, str(args.pack), args.worlds, args.seed)
    except PackError as error:
        print(f"validate: {error}", file=sys.stderr)
        return 2
    print(f"{pack.name} {pack.content_hash[:12]}: valid; full-map expert return "
          f"{means['returns']:.1f}, life {means['life']:.1f} of {pack.lifespan}, "
          f"retired {means['retired']:.0%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
