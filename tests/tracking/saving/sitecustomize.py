"""Loaded by each Python process of a `dvc repro` that is killed: a training saves every step.

So there is something to resume from, after however short a life.
"""

import gc
import sys

# Of a rank, not of who starts the ranks: that one needs no PyTorch.
if (
    any(word.startswith("stages.") for word in sys.orig_argv)
    and "stages.ranks" not in sys.orig_argv
):
    gc.disable()  # while PyTorch is imported, as `stages` does

    from hamlet.learning.checkpoint import Checkpoint

    Checkpoint.__init__.__defaults__ = (0.0,)
