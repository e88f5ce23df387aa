"""The language of the code, as tests: prose in whole sentences, words of the glossary, names that
say something.

Oracle: patterns of an older dialect that readers could not follow, counted over every docstring,
attribute docstring and comment. The budgets in ``prose.yaml`` only fall: lower a package's budget
when its count has fallen, and never raise one. A low count is a sign, not the aim. The aim is a
reader who understands one function without having seen the project.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache

import pytest
import yaml

from tests.sources import ROOT, Module, parse_modules
from tools.check_subjects import violations

BUDGETS = yaml.safe_load((ROOT / "tests/prose.yaml").read_text(encoding="utf-8"))
IN_MID_SENTENCE = re.compile(
    r"(Of|By|Who|Whose|Whom|So (many|much|long|often)|What|Where|Behind|Beside|Since when|Until"
    r"|Those|As)\b"
)
DIALECT = re.compile(
    r"\b(so (many|much|long|often)|those (that|who|whose|of)|of (them|these|those)"
    r"|who (has|is|asks|waits|looks|opens|comes|wants|gets|shows|showed|sends)"
    r"|nobody|everybody\w*|whoever|whom|is told|was told|hears|tells?|told)\b",
    re.IGNORECASE,
)
NO_NAMES = frozenset(
    "over told told_apart hurry look_anew looked_upon worth take turn who its everybodys".split()
)


def pieces(module: Module) -> Iterator[tuple[int, str]]:
    """Yield each piece of prose with its line."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ").strip()
            if text and not text.startswith(("noqa", "type:", "!", "pragma")):
                yield token.start[0], text


@cache
def prose_of(package: str) -> list[tuple[str, str]]:
    """Return all prose below a folder, each piece with its place."""
    return [
        (f"{module.path}:{line}", text)
        for module in parse_modules()
        if module.path.startswith(f"{package}/") and not module.path.endswith("test_prose.py")
        for line, text in pieces(module)
    ]


@pytest.mark.parametrize("package", BUDGETS)
def test_few_pieces_begin_in_the_middle_of_a_sentence(package: str) -> None:
    prose = prose_of(package)
    found = [f"{place}: {text[:60]}" for place, text in prose if IN_MID_SENTENCE.match(text)]
    most = BUDGETS[package]["in_mid_sentence"]
    assert len(found) <= most, f"{len(found)} pieces, at most {most}:\n" + "\n".join(found)


@pytest.mark.parametrize("package", BUDGETS)
def test_dialect_is_rare(package: str) -> None:
    prose = prose_of(package)
    found = [
        f"{place}: {match.group()}" for place, text in prose for match in DIALECT.finditer(text)
    ]
    most = BUDGETS[package]["dialect_words"]
    assert len(found) <= most, f"{len(found)} words, at most {most}:\n" + "\n".join(found)


def test_every_package_has_a_budget() -> None:
    """A new package begins with a budget of nothing."""
    folders = {
        "/".join(module.path.split("/")[:2]) for module in parse_modules() if "/" in module.path
    }
    budgets = set(BUDGETS)
    missing = {
        folder
        for folder in folders
        if not any(folder == one or folder.startswith(f"{one}/") for one in budgets)
        and not any(one.startswith(f"{folder}/") for one in budgets)
        and not folder.endswith(".py")
    }
    assert missing == set()


def test_no_function_has_a_name_that_means_six_things() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{module.path}:{node.lineno}: {node.name}"
        for module in parse_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, functions) and node.name.lstrip("_") in NO_NAMES
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("subject", "rules"),
    [
        pytest.param("wire: Reject drafts that exceed max_nodes", 0, id="good"),
        pytest.param("device, wire: Rewrite the prose", 0, id="two areas"),
        pytest.param("wire: the drafts that are too long", 1, id="no verb"),
        pytest.param("wire: Rejected drafts", 1, id="not imperative"),
        pytest.param("wire: What a caller needs stands where it is called", 1, id="a riddle"),
        pytest.param("Reject drafts", 1, id="no area"),
        pytest.param("wire: Reject drafts.", 1, id="a full stop"),
        pytest.param("tests: Feed long prompts", 0, id="an order that ends like a past form"),
        pytest.param("wire: Reject " + "x" * 72, 1, id="too long"),
    ],
)
def test_subjects_of_commits_are_orders(subject: str, rules: int) -> None:
    assert len(violations([subject])) == rules
