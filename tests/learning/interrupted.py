"""A training that is stopped in the middle, for tests of how it goes on."""

import torch


class Stopped(Exception):
    """What ends the training."""


class StoppedLog:
    """A trainer's log that ends the training before the step `stop`; None lets it run."""

    def __init__(self, stop=None):
        self.stop = stop

    def steps(self, total, start):
        for step in range(start, total):
            if step == self.stop:
                raise Stopped
            yield step

    def record(self, step, metrics):
        assert metrics
        assert all(torch.isfinite(value).all() for value in metrics.values())
