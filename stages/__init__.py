"""The DVC stages. This package is imported before PyTorch and sets what must be set first."""

import os

# Idle threads of OpenMP sleep instead of spinning: on shared cores spinning makes two processes
# block each other for whole time slices.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
