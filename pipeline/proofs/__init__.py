"""The second world: knowledge-graph reasoning as a decision process, on the same RL core."""
