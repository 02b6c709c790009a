"""Loading text: both formats, and errors that name the line."""

from __future__ import annotations

import pytest
import torch

from hamlet.artifacts import HamletError
from hamlet.proofs import load_graph
from hamlet.proofs.data import build_graph, parse_atom, write_graph
from hamlet.proofs.kinship import kinship_graph
from tests.proofs.helpers import shared_graph


def folder(path, train="p(a,b).\n", rules="r0:1:p(x,y) -> q(x,y)\n", **more):
    path.mkdir(exist_ok=True)
    for name, text in {"train": train, "rules": rules, **more}.items():
        (path / f"{name}.txt").write_text(text)
    return path


def test_both_formats_give_the_same_graph(tmp_path):
    prolog = load_graph(folder(tmp_path / "x", "likes(ann,bob).\nknows(bob,ann)\n"))
    tabs = load_graph(folder(tmp_path / "y", "ann\tlikes\tbob\nbob\tknows\tann\n"))
    assert prolog.entities == tabs.entities
    assert torch.equal(prolog.splits["train"], tabs.splits["train"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train": "p(a,b).\np(a;b)\n"}, r"train.txt:2: 'p\(a;b\)' is not a fact"),
        ({"train": "a\tp\n"}, r"train.txt:1: 2 tab-separated fields"),
        ({"train": "\n"}, "holds no facts"),
        ({"rules": "r0:1:p(x,y) -> q(x,y)\nnonsense\n"}, r"rules.txt:2: 'nonsense' is not a rule"),
        ({"rules": "r0:high:p(x,y) -> q(x,y)\n"}, r"rules.txt:1: the weight 'high'"),
        ({"rules": "r0:1:p(x,y) -> q(x,z)\n"}, r"rules.txt:1: the head's variable Z"),
        ({"rules": "r0:1:p(x,y) or p(y,x) -> q(x,y)\n"}, r"rules.txt:1: .* not a list of atoms"),
        ({"domain2constants": "people\n"}, r"domain2constants.txt:1: the domain people"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path, files, message):
    with pytest.raises(HamletError, match=message):
        load_graph(folder(tmp_path / "x", **files))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(HamletError, match="is not a folder"):
        load_graph(tmp_path / "nowhere")
    (tmp_path / "x").mkdir()
    with pytest.raises(HamletError, match=r"train.txt is missing"):
        load_graph(tmp_path / "x")
    (tmp_path / "x" / "train.txt").write_text("p(a,b).\n")
    with pytest.raises(HamletError, match=r"rules.txt is missing"):
        load_graph(tmp_path / "x")


def test_held_out_triples_are_never_known(tmp_path):
    a, b, c = (parse_atom(f"p(a,{x})") for x in "bcd")
    graph = build_graph("x", {"train": [a, a], "valid": [a, b, c], "test": [a, b]}, [])
    assert [len(graph.splits[s]) for s in ("train", "valid", "test")] == [1, 1, 1]


def test_writing_and_reading_gives_the_graph_back(tmp_path):
    graph = kinship_graph(2, 3)
    write_graph(graph, str(tmp_path / "x"))
    again = load_graph(str(tmp_path / "x"))
    assert again.entities == graph.entities
    assert all(torch.equal(again.splits[s], graph.splits[s]) for s in graph.splits)
    assert [(r.name, r.body, r.head) for r in again.rules] == [
        (r.name, tuple(type(a)(a[0], *(v.upper() for v in a[1:])) for a in r.body), r.head)
        for r in graph.rules
    ]


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("family", 19845, 5626), ("countries_s3", 983, 24), ("nations", 1592, 201)],
)
def test_the_benchmarks_load_whole(name, train, test):
    graph = load_graph(shared_graph(name))
    assert len(graph.splits["train"]) == train
    assert len(graph.splits["test"]) == test
