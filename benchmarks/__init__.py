"""What is measured here looks for garbage as seldom as a stage does (`stages.common`)."""

import gc

gc.set_threshold(20_000)
