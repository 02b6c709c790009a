"""Learning from logged experience: read logs, train on them, judge without a simulator, export."""
