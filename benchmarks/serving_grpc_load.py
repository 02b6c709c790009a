"""gRPC load from one process: a stream and a life each, the next request when one is answered.

gRPC's own Python client is most of what this costs: its row is a lower bound of the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from hamlet.serving.oip import MESSAGES, SERVICE, STREAM


async def load(port: int, plans: list[list[bytes]], seconds: float) -> dict[str, Any]:
    """As `serving_load.load`; a plan is the requests of a stream, serialised, in turn for ever."""
    name, _, answer = STREAM
    latencies: list[float] = []
    began = time.perf_counter()
    measured_from, until = began + min(1.0, seconds / 5), began + seconds

    async def stream(channel: grpc.aio.Channel, plan: list[bytes]) -> None:
        call = channel.stream_stream(
            f"/{SERVICE}/{name}", lambda raw: raw, MESSAGES[answer].FromString
        )()
        for request in itertools.cycle(plan):
            sent = time.perf_counter()
            if sent > until:
                break
            await call.write(request)
            told = await call.read()
            if told.error_message:
                raise SystemExit(told.error_message)
            if (now := time.perf_counter()) > measured_from:
                latencies.append(now - sent)
        await call.done_writing()
        await call.read()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.gather(*(stream(channel, plan) for plan in plans))
    latencies.sort()
    return {
        "requests_per_s": len(latencies) / (until - measured_from),
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)],
    }


def main() -> None:
    """`serving_grpc_load.py PORT SECONDS FILE`: lines of JSON [requests...], each in hex."""
    port, seconds, file = sys.argv[1:]
    plans = [
        [bytes.fromhex(text) for text in json.loads(line)]
        for line in Path(file).read_text().splitlines()
    ]
    print(json.dumps(asyncio.run(load(int(port), plans, float(seconds)))))


if __name__ == "__main__":
    main()
