"""Run a training stage in several processes of this machine, one thread each.

    python -m stages.ranks 2 social

is `torchrun --standalone --nproc-per-node 2 -m stages.social`, but what goes wrong stays one line:
torchrun follows the stage's own with a page.
"""

import argparse
import logging
import os
from collections.abc import Sequence

from hamlet.params import load_params
from stages.common import TRAINED, one_line_errors


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.ranks", description=__doc__)
    parser.add_argument("count", type=int, help="processes")
    parser.add_argument("stage", choices=TRAINED)
    asked = parser.parse_args(arguments)
    if asked.count < 1:
        parser.error(f"count is {asked.count}: ask for one process or more")
    with one_line_errors(asked.stage):
        load_params()  # what is wrong in params.yaml is told once, not by every rank

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable()  # torchrun's own
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    ranks = ["--standalone", f"--nproc-per-node={asked.count}", "-m", f"stages.{asked.stage}"]
    try:
        run(parse_args(ranks))
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
        raise SystemExit(code if code > 0 else 128 - code) from None
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None


if __name__ == "__main__":
    main()
