"""Loaded by each Python process of a `dvc repro` that is killed: a training saves every step.

So there is something to resume from, after however short a life.
"""

import sys

if any(word.startswith("stages.") for word in sys.orig_argv):
    from hamlet.learning.checkpoint import Checkpoint

    Checkpoint.__init__.__defaults__ = (0.0,)
