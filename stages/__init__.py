"""The DVC stages. This package is imported before PyTorch and sets what must be set first."""

import gc
import os
import sys

# What a stage imports is no garbage: to look for some again and again took a third of its start.
if sys.argv[0] == "-m":  # `python -m stages.X`, not who imports a part of it
    gc.disable()  # until `stages.common.one_line_errors`

# Idle threads of OpenMP sleep instead of spinning: on shared cores spinning makes two processes
# block each other for whole time slices. GNU's may spin for some 10 microseconds first, which is
# shorter than waking up and makes a training's small operations 1.4 times as fast.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
