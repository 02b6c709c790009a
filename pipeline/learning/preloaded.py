"""Imported by a process of which others are forks: what takes seconds to import, once.

What is imported is no garbage. To look for some meanwhile takes a third longer, and to look again
in a fork would copy the memory that it shares.
"""

import gc

gc.disable()
import tensordict  # noqa: E402, F401
import torch  # noqa: E402, F401

gc.freeze()
gc.enable()
