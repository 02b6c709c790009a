"""One-line faults of the source: what a hurried hand gets wrong (a sign, an index, an order, a
dropped term, ...). `tests.mutation` plants them.

Faults are drawn by line, one of each line, so that a long formula does not weigh more than a short
one. Lines that only say something to a reader (docstrings, messages, annotations) have none.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "modules": ["pipeline/modules"],
    "learning": ["pipeline/learning"],
    "proofs": ["pipeline/proofs"],
    "serving": ["pipeline/serving/engine.py", "pipeline/serving/protocol.py"],
    "town": ["pipeline/town"],
}


class Fault(NamedTuple):
    """One change of the source.

    Attributes:
        file: path from the root; line: 1-based; function: the innermost one around the line.
        what: the operator's name; old, new: source before and after.
        span: byte offsets of `old` in the file.
    """

    file: str
    line: int
    function: str
    what: str
    old: str
    new: str
    span: tuple[int, int]


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mod, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitXor: ast.BitAnd,
}  # fmt: skip
PARTNERS = {
    name: other
    for pair in [
        ("max", "min"), ("amax", "amin"), ("maximum", "minimum"), ("any", "all"), ("sum", "mean"),
        ("argmax", "argmin"), ("clamp_min", "clamp_max"), ("ceil", "floor"), ("zeros", "ones"),
        ("zeros_like", "ones_like"),
    ]
    for name, other in (pair, pair[::-1])
}  # fmt: skip
DROPPED_CALLS = {
    "abs", "exp", "log", "square", "sqrt", "sigmoid", "softmax", "log_softmax", "clamp", "cumsum",
    "clamp_min", "clamp_max", "flip", "sort", "detach", "float", "round", "reversed", "sorted", "t",
}  # fmt: skip
SILENT_CALLS = {"HamletError", "warn", "region", "info", "print", "Field", "TypeVar"}


def changed(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def faults_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(operator, what takes the node's place) of every fault in this node itself."""
    match node:
        case ast.Compare(ops=[op], left=left, comparators=[right]):
            yield "comparison", changed(node, ops=[COMPARISONS[type(op)]()])
            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                yield "sides of a comparison", changed(node, left=right, comparators=[left])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield "operator", changed(node, op=OPERATORS[type(op)]())
            yield "dropped term", left
            yield "dropped term", right
            if isinstance(op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
                yield "order", changed(node, left=right, right=left)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield "sign", operand
        case ast.BoolOp(op=op, values=values):
            yield "and/or", changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield (
                "dropped condition",
                changed(node, values=values[:-1]) if values[2:] else values[0],
            )
            yield "dropped condition", changed(node, values=values[1:]) if values[2:] else values[1]
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(value * 2 if value else 1.0)
        case ast.Slice(lower=lower, upper=upper, step=None):
            if lower is not None:
                yield "slice", changed(node, lower=None)
            if upper is not None:
                yield "slice", changed(node, upper=None)
        case ast.IfExp(body=body, orelse=orelse):
            yield "branches", changed(node, body=orelse, orelse=body)
        case ast.comprehension(ifs=[*_, _]):
            yield "dropped filter", changed(node, ifs=[])
        case ast.Call():
            yield from faults_of_a_call(node)


COMMUTATIVE = {"max", "min", "maximum", "minimum", "logical_and", "logical_or", "isclose"}
"""Calls whose first two arguments may be swapped: that is no fault."""


EVEN = {"abs", "square"}
"""Calls that say the same of a difference and of that difference turned round."""


def inside_even(node: ast.AST) -> ast.AST | None:
    """What such a call is of."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name, value=value), args=[]) if name in EVEN:
            return value
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[value]):
            return value if name in EVEN else None
    return None


def faults_of_a_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    called, args = node.func, node.args
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    plain = not any(isinstance(x, ast.Starred) for x in args)
    if name in PARTNERS:
        swapped = PARTNERS[name]
        if isinstance(called, ast.Attribute):
            yield "function", changed(node, func=changed(called, attr=swapped))
        elif name in ("max", "min", "any", "all"):
            yield "function", changed(node, func=ast.Name(swapped, ast.Load()))
    if name in DROPPED_CALLS:
        if isinstance(called, ast.Attribute) and not (
            isinstance(called.value, ast.Name) and called.value.id in ("torch", "math", "np", "F")
        ):
            yield "dropped call", called.value
        elif len(args) >= 1:
            yield "dropped call", args[0]
    if name == "where" and len(args) == 3:
        yield "branches", changed(node, args=[args[0], args[2], args[1]])
    elif (
        len(args) >= 2
        and plain
        and name not in COMMUTATIVE
        and not any(isinstance(x, ast.Constant) for x in args[:2])
    ):
        yield "arguments", changed(node, args=[args[1], args[0], *args[2:]])


def faults_of_a_statement(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.If(test=test):
            yield "negated condition", ast.UnaryOp(ast.Not(), test)
        case ast.AugAssign(target=target, value=value):
            yield "dropped update", ast.Pass()
            yield "dropped term", ast.Assign([target], value, lineno=node.lineno)
        case ast.Expr(value=ast.Call()):
            yield "dropped statement", ast.Pass()
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            if any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(value)):
                yield "dropped statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", ast.Pass()
        case ast.Break() | ast.Continue():
            yield "dropped statement", ast.Pass()


def silent(node: ast.AST) -> bool:
    """Whether all in it is said to a reader or a type checker, so that no test could notice."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in SILENT_CALLS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def faults_in(file: str) -> list[Fault]:
    """Every fault of a source file."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Fault] = []
    unordered: list[ast.AST] = []

    def add(node: ast.AST, what: str, other: ast.AST, function: str) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old, new = source[begin:end].decode(), ast.unparse(ast.fix_missing_locations(other))
        if isinstance(node, ast.expr) and not isinstance(node, ast.Slice):
            new = f"({new})"
        found.append(Fault(file, node.lineno, function, what, old, new, (begin, end)))

    def visit(node: ast.AST, function: str) -> None:
        if silent(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
                visit(child, node.name)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                visit(node.value, function)
            return
        for what, other in faults_of_a_statement(node):
            if isinstance(node, ast.If):
                add(node.test, what, other, function)
            else:
                add(node, what, other, function)
        if inner := inside_even(node):
            unordered.append(inner)
        if isinstance(node, ast.comprehension):
            for what, _ in faults_of(node):  # a condition that always holds
                add(node.ifs[0], what, ast.Constant(True), function)
        else:
            for what, other in faults_of(node):
                if what != "order" or node not in unordered or not isinstance(node.op, ast.Sub):
                    add(node, what, other, function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return [x for x in found if x.old.strip() != x.new.strip("()")]


def sample(packages: list[str], count: int, seed: int) -> list[Fault]:
    """`count` faults of different lines, spread over packages by their lines."""
    by_line: dict[tuple[str, int], list[Fault]] = {}
    for package in packages:
        for place in PACKAGES[package]:
            paths = (
                [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
            )
            for path in paths:
                for fault in faults_in(path.relative_to(ROOT).as_posix()):
                    by_line.setdefault((fault.file, fault.line), []).append(fault)
    rng = random.Random(seed)
    lines = rng.sample(sorted(by_line), min(count, len(by_line)))
    return [rng.choice(by_line[line]) for line in lines]


def package_of(file: str) -> str:
    return next(p for p, places in PACKAGES.items() if any(file.startswith(x) for x in places))
