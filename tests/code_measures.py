"""How readable the package is, in numbers: `python tests/code_measures.py [FOLDER]` prints density, names, complexity.

Density is syntax-tree nodes for each line of code, docstrings and comments left out, after one and the same formatting:
line length 120, trailing commas ignored. Packing two ideas into a line raises it; a longer signature does not.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tacita"

BANNED = frozenset(
    ["told", "given", "kept", "found", "made", "left", "asked", "heard", "noised", "said", "held", "taken", "seen", "one", "here", "there", "mine", "theirs", "again", "anew", "beside", "somebody", "everybody"]
)
"""Participles, pronouns and adverbs that say nothing as the whole name of a value, function, class or module."""

FORMAT = ("format", "--line-length", "120", "--config", "format.skip-magic-trailing-comma=true", "-")


def sources(folder: Path = PACKAGE) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


# Density


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Statements that are only a string."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement


def code_lines(source: str, tree: ast.AST) -> int:
    """Lines that hold code: no blank ones, comments or docstrings."""
    lines: set[int] = set()
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for statement in docstrings(tree):
        lines.difference_update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return len(lines)


def node_count(tree: ast.AST) -> int:
    return sum(1 for _ in ast.walk(tree)) - 2 * sum(1 for _ in docstrings(tree))


def formatted(source: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run([str(ruff), *FORMAT], input=source, capture_output=True, text=True, check=True)
    return done.stdout


def density(texts: dict[str, str]) -> float:
    """Nodes per line of code over some sources together."""
    nodes = lines = 0
    for source in texts.values():
        text = formatted(source)
        tree = ast.parse(text)
        nodes += node_count(tree)
        lines += code_lines(text, tree)
    return nodes / max(1, lines)


# Names


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module gives: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def banned_names(texts: dict[str, str]) -> list[str]:
    bad = [f"{path}: the module's own name" for path in texts if Path(path).stem in BANNED]
    for path, source in texts.items():
        for name, line in bound_names(ast.parse(source)):
            if name.strip("_").lower() in BANNED:
                bad.append(f"{path}:{line}: {name}")
    return bad


def repeated_classes(texts: dict[str, str]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for path, source in texts.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


# Complexity


def complex_functions(texts: dict[str, str], most: int) -> list[str]:
    from radon.complexity import cc_visit
    from radon.visitors import Function

    found = []
    for path, source in texts.items():
        for block in cc_visit(source):
            if isinstance(block, Function) and block.complexity > most:
                found.append(f"{path}:{block.lineno}: {block.fullname} {block.complexity}")
    return found


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    texts = sources(folder)
    rooms = defaultdict(dict)
    for path, source in texts.items():
        rooms[path.split("/")[0]][path] = source
    for room, members in rooms.items():
        print(f"{density(members):6.2f}  {room}")
    print(f"{density(texts):6.2f}  all")
    print(len(banned_names(texts)), "banned names,", len(repeated_classes(texts)), "class names twice")
    print(len(complex_functions(texts, 15)), "functions above complexity 15")


if __name__ == "__main__":
    main()
