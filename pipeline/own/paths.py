"""Where the stages of an own world's project read and write; all below its folder."""

from __future__ import annotations

from pathlib import Path

ARTIFACTS = Path("artifacts")
CHECKPOINTS = Path("checkpoints")
WORLD = ARTIFACTS / "world.json"
DATASET = ARTIFACTS / "dataset.pt"
PERCEPTION_WEIGHTS = ARTIFACTS / "perception.pt"
PERCEPTION = ARTIFACTS / "perception.pt2"
WORLD_MODEL = ARTIFACTS / "world_model.pt2"
POLICY = ARTIFACTS / "policy.pt2"
PLAYED = ARTIFACTS / "played.pt"
SOCIAL = ARTIFACTS / "social.pt2"
AGENT = ARTIFACTS / "agent.onnx"
RETURNS = ARTIFACTS / "plots" / "returns.csv"
REPORT = ARTIFACTS / "report.md"


def metrics(stage: str) -> Path:
    """The numbers of a stage."""
    return ARTIFACTS / "metrics" / f"{stage}.json"


def curve(stage: str) -> Path:
    """The curve of a stage."""
    return ARTIFACTS / "plots" / f"{stage}.csv"
