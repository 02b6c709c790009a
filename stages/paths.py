"""Where the pipeline keeps what it makes; the same names as in dvc.yaml."""

from pathlib import Path

ARTIFACTS = Path("artifacts")
DATASET = ARTIFACTS / "dataset"
PERCEPTION_WEIGHTS = ARTIFACTS / "perception.pt"
PERCEPTION = ARTIFACTS / "perception.pt2"
WORLD_MODEL = ARTIFACTS / "world_model.pt2"
SOCIAL = ARTIFACTS / "social.pt2"
SENSE = ARTIFACTS / "sense.onnx"
POLICY = ARTIFACTS / "policy"
POPULATION = ARTIFACTS / "population"
WINNER = ARTIFACTS / "winner"
AGENT = ARTIFACTS / "agent.onnx"
TRITON = ARTIFACTS / "triton"
PROVER = ARTIFACTS / "prover"
PROVER_ONNX = ARTIFACTS / "prover.onnx"
RANKS = ARTIFACTS / "ranks.csv"
REPORT = ARTIFACTS / "REPORT.md"
EPISODE = ARTIFACTS / "episode.gif"
TUNED = ARTIFACTS / "tune"


def metrics(stage: str) -> Path:
    return ARTIFACTS / "metrics" / f"{stage}.json"


def curve(stage: str) -> Path:
    return ARTIFACTS / "plots" / f"{stage}.csv"


def home(folder: Path, number: int) -> Path:
    """Where a member of a population is kept; the first is the policy as it came."""
    return folder / f"member_{number}"
