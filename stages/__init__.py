"""The DVC stages. This package is imported before PyTorch and sets what must be set first."""

import os

# Idle threads of OpenMP sleep instead of spinning: on shared cores spinning makes two processes
# block each other for whole time slices. GNU's may spin for some 10 microseconds first, which is
# shorter than waking up and makes a training's small operations 1.4 times as fast.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
