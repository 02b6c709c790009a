"""The commands `hamlet serve` and `hamlet card`."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from hamlet.artifacts import HamletError, read_json

StatePairs = Annotated[
    list[str] | None,
    typer.Option(help="INPUT=OUTPUT that are state, where their names do not say so. Repeatable."),
]
ActionName = Annotated[str | None, typer.Option(help="The output that is the action.")]


def serve(
    source: Annotated[
        str,
        typer.Argument(
            help="Any ONNX policy, or models:/hamlet-agent@champion of MLflow's registry."
        ),
    ] = "artifacts/agent.onnx",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Answer gRPC there too; 0 takes a free port."),
    ] = None,
    state_file: Annotated[
        Path | None,
        typer.Option(help="Sessions are saved here every few seconds and restored from it."),
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, max=1_000_000)] = 10_000,
    session_ttl: Annotated[
        float, typer.Option(min=1, help="Seconds after which an idle session ends; inf: never.")
    ] = 600.0,
    name: Annotated[
        str | None, typer.Option(help="Of the model in its URLs; default: the file's or MLflow's.")
    ] = None,
    state: StatePairs = None,
    action: ActionName = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web page's origin that may ask (CORS); * for all. Repeatable."),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option(min=0, help="After SIGTERM: so long not ready, but answering, then the end."),
    ] = 0.0,
    provider: Annotated[
        Literal["cpu", "cuda", "auto"],
        typer.Option(help="Where it computes; auto: CUDA if it works and says what the CPU says."),
    ] = "cpu",
) -> None:
    """Serve a policy over HTTP: the Open Inference Protocol v2, with every session's state kept.

    HAMLET_TOKEN in the environment asks clients for that bearer token. A new file, or an alias that
    moves, is taken up while it runs.
    """
    if grpc_port is not None and find_spec("grpc") is None:
        raise HamletError(
            "`hamlet serve --grpc-port` needs grpcio",
            'run `pip install -c constraints.txt ".[serve,cpu,grpc]"`',
        )
    for package in ("uvicorn", "orjson", "websockets"):
        if find_spec(package) is None:
            raise HamletError(
                f"`hamlet serve` needs {package}",
                'run `pip install -c constraints.txt ".[serve,cpu]"`',
            )
    from hamlet.serving.server import serve as serve_until_stopped
    from hamlet.serving.source import open_source

    for option, number in (("--session-ttl", session_ttl), ("--drain-seconds", drain_seconds)):
        if math.isnan(number) or (option == "--drain-seconds" and math.isinf(number)):
            raise HamletError(f"{option} is {number}", "give a number of seconds")
    if name is not None and not re.fullmatch(r"[\w.~-]{1,128}", name, re.ASCII):
        raise HamletError(f"--name '{name}' cannot stand in a URL", "letters, digits and . _ ~ -")
    opened = open_source(source, _pairs(state), action)
    if provider != "cpu":
        from hamlet.serving.provider import Placed

        opened = Placed(opened, provider)
    serve_until_stopped(
        opened,
        host,
        port,
        state_file,
        max_sessions,
        session_ttl,
        name=name,
        origins=tuple(allow_origin or ()),
        drain=drain_seconds,
        grpc_port=grpc_port,
    )


def _pairs(given: list[str] | None) -> dict[str, str]:
    """`--state h_in=h_out` as a mapping."""
    pairs = {}
    for pair in given or []:
        left, sign, right = pair.partition("=")
        if not (left and sign and right):
            raise HamletError(f"--state {pair} is no pair", "write --state INPUT=OUTPUT")
        pairs[left] = right
    return pairs


def card(
    policy: Annotated[Path, typer.Argument(help="An ONNX file.")],
    state: StatePairs = None,
    action: ActionName = None,
) -> None:
    """Write the card of an ONNX policy made elsewhere, FILE.json: what is state, what the action.

    In it you may then name the actions (`policy.actions`), a bool input that says which are legal
    (`policy.mask`), states that do not begin as zeros (`policy.initial`), and limits of inputs
    (`limits`: NAME: [LOW, HIGH]).
    """
    from hamlet.artifacts import card_path, write_card
    from hamlet.ort import open_unchecked
    from hamlet.serving.signature import card_of, maybe_state, signature_of

    if not policy.is_file():
        raise HamletError(f"{policy} is missing", "name an ONNX file")
    if card_path(policy).exists() and read_json(card_path(policy)).get("kind") != "policy":
        raise HamletError(f"{policy} has a card of its own making", "it is served as it is")
    session = open_unchecked(policy.as_posix(), name=str(policy))
    made = card_of(session, str(policy), _pairs(state), action)
    write_card(policy, "policy", made["schema"], extra={"policy": made["policy"]})
    print(f"{card_path(policy)} written: {json.dumps(made['policy'])}")
    if (told := maybe_state(signature_of(made, str(policy)))) is not None:
        print(f"{policy}: {told}", file=sys.stderr)
