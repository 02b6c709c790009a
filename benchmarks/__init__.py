"""What is measured here runs as in a stage: so garbage is looked for as seldom (`stages.common`)."""

import gc

gc.set_threshold(20_000)
