"""The container and the manifest say what the code has: looked at, not built or applied."""

from __future__ import annotations

import json
import re

import pytest
import typer
import yaml
from copied_repo import ROOT

from hamlet.cli import app

PLACE = ROOT / "deploy"


@pytest.fixture(scope="module")
def container() -> list[tuple[str, str]]:
    """Instructions of the Containerfile and what they are given."""
    text = re.sub(r"\\\n", " ", (PLACE / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


@pytest.fixture(scope="module")
def manifest() -> dict:
    return yaml.safe_load((PLACE / "kserve.yaml").read_text())


def given(arguments: list[str]) -> dict:
    """What `hamlet serve` makes of its arguments; a wrong one ends it."""
    command = typer.main.get_command(app).commands["serve"]
    return command.make_context("serve", list(arguments)).params


def entry(container) -> list[str]:
    return json.loads(dict(container)["ENTRYPOINT"])


def test_the_container_copies_what_is_there_and_installs_it(container):
    copied = [what.split()[:-1] for kind, what in container if kind == "COPY"]
    for source in (s for sources in copied for s in sources):
        assert (ROOT / source).exists(), source
    project = (ROOT / "pyproject.toml").read_text()
    runs = " ".join(what for kind, what in container if kind == "RUN")
    (installed,) = re.findall(r'"\.\[([\w,]+)\]"', runs)
    for extra in installed.split(","):
        assert re.search(rf"^{extra} = \[", project, re.M), extra
    for needed in re.findall(r'^(?:readme|license-files) = \[?"([\w.]+)"', project, re.M):
        assert any(needed in sources for sources in copied), needed
    assert container[0][0] == "FROM"
    assert dict(container)["USER"] != "0"


def test_the_container_starts_the_server(container):
    program, command, *options = entry(container)
    assert (program, command) == ("hamlet", "serve")
    told = given([*options, *json.loads(dict(container)["CMD"])])
    ports = [int(port) for port in dict(container)["EXPOSE"].split()]
    assert [told["port"], told["grpc_port"]] == ports
    assert told["host"] == "0.0.0.0"
    assert f":{told['port']}/v2/health/live" in dict(container)["HEALTHCHECK"]


def test_the_manifest_is_an_inference_service(manifest, container):
    assert manifest["apiVersion"] == "serving.kserve.io/v1beta1"
    assert manifest["kind"] == "InferenceService"
    predictor = manifest["spec"]["predictor"]
    (only,) = predictor["containers"]
    assert only["name"] == "kserve-container"  # KServe's own name for it
    told = given([*entry(container)[2:], *only["args"]])
    assert [p["containerPort"] for p in only["ports"]] == [told["port"], told["grpc_port"]]
    assert [p["name"] for p in only["ports"]] == ["http1", "h2c"]  # how KServe tells them apart
    mounts = {m["mountPath"]: m["name"] for m in only["volumeMounts"]}
    assert told["source"].rpartition("/")[0] in mounts
    assert str(told["state_file"].parent) in mounts
    assert set(mounts.values()) == {v["name"] for v in predictor["volumes"]}
    assert predictor["terminationGracePeriodSeconds"] > told["drain_seconds"] + 30


def test_the_probes_ask_what_the_server_answers(manifest):
    from hamlet.serving.app import App
    from hamlet.serving.engine import Engine
    from hamlet.serving.metrics import Metrics

    routes = App(Engine(Metrics(), 1, 1.0), print).routes
    (only,) = manifest["spec"]["predictor"]["containers"]
    for probe, last in (("livenessProbe", "live"), ("readinessProbe", "ready")):
        path = tuple(only[probe]["httpGet"]["path"].strip("/").split("/"))
        assert path == ("v2", "health", last)
        assert "GET" in routes[path]
    assert [e["name"] for e in only["env"]] == ["HAMLET_TOKEN"]
