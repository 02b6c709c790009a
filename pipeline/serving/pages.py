"""Two pages for a browser: what is served here, and every route with what it takes.

They need nothing from elsewhere and run no script.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from hamlet.serving.model import Model
from hamlet.serving.protocol import outputs_of

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { text-align: left; padding: .2rem 1rem .2rem 0 }
pre, code { font: 13px/1.4 ui-monospace, monospace } pre { overflow: auto; padding: .6rem;
background: #8881 } b { display: inline-block; min-width: 4.5rem } summary { cursor: pointer }
"""


def _page(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def front_page(model: Model, sessions: int) -> str:
    """What is served: its tensors, and where to go on."""
    signature = model.signature

    def rows(names: list[str], fields: dict[str, Any]) -> str:
        return "".join(
            f"<tr><td><code>{escape(n)}</code><td>{fields[n].datatype}"
            f"<td>{fields[n].sent(-1 if signature.batched else 1)}"
            for n in names
        )

    states = "".join(
        f"<tr><td><code>{escape(a)}</code><td>becomes<td><code>{escape(b)}</code>"
        for a, b in signature.states.items()
    )
    path = f"/v2/models/{escape(model.name)}"
    return _page(
        model.name,
        f"<h1>{escape(model.name)}</h1><p>Version {escape(model.version)}, {sessions} sessions "
        f"open. It answers with <code>{escape(model.action)}</code>.</p>"
        f"<h2>Takes</h2><table>{rows(signature.observation, signature.inputs)}</table>"
        f"<h2>Gives</h2><table>{rows(outputs_of(model, True), signature.outputs)}</table>"
        f"<h2>Remembers</h2><table>{states or '<tr><td>nothing'}</table>"
        f'<p><a href="/docs">Every route</a> · <a href="{path}">metadata</a> · '
        '<a href="/metrics">metrics</a> · <a href="/openapi.json">OpenAPI</a></p>',
    )


def docs_page(document: dict[str, Any]) -> str:
    """Every route of an OpenAPI document."""
    parts = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "parameters":
                continue
            told = f"<b>{method.upper()}</b> <code>{escape(path)}</code>"
            told += f" {escape(operation['summary'])}"
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json")
            takes = json.dumps(schema["schema"], indent=1) if schema else "no body"
            answers = "".join(
                f"<tr><td>{code}<td>{escape(said['description'])}"
                for code, said in sorted(operation["responses"].items())
            )
            parts.append(
                f"<details><summary>{told}</summary><table>{answers}</table>"
                f"<pre>{escape(takes)}</pre></details>"
            )
    title = f"{document['info']['title']}: every route"
    return _page(title, f"<h1>{escape(title)}</h1>{''.join(parts)}")
