"""Check the subjects of commits: ``area: Verb ...``, imperative, at most 72 characters.

    python -m tools.check_subjects [BASE]

BASE is the last commit that is not checked, by default the one before the rule was checked at all.
Where git or BASE is missing, as in a shallow clone, nothing is checked and one line says so. Exits
with 1 if a subject breaks the rule.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

FIRST_CHECKED_AFTER = "e2c9c19c1da308cebfac41d2361c77affaacac9a"
LONGEST = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_./-]*(, [a-z][a-z0-9_./-]*)*: (?P<verb>[A-Z][a-z]+)\b.*[^.\s]")
# Words that begin a subject that is no order. The list grows when one slips through.
NO_VERBS = frozenset(
    "A An All Any As At Both But Each Every Fewer For From How If In It Its Less More Most No Not"
    " Now Of On One Only Or So Some That The There These They This Those To Two What When Where"
    " Which Who Whoever Why With".split()
)

# Imperatives that end like other forms of a verb.
IMPERATIVES = frozenset("Bring Embed Exceed Feed Ping Proceed Seed Shed Speed".split())


def broken_rules(subject: str) -> Iterator[str]:
    """Yield each rule that ``subject``, the first line of a commit's message, breaks."""
    if len(subject) > LONGEST:
        yield f"{len(subject)} characters, at most {LONGEST}"
    match = SUBJECT.fullmatch(subject)
    if match is None:
        yield "not of the form `area: Verb ...`, without a full stop"
    elif (verb := match["verb"]) in NO_VERBS or (
        verb.endswith(("ed", "ing")) and verb not in IMPERATIVES
    ):
        yield f"`{verb}` is not a verb in the imperative"


def violations(subjects: Iterable[str]) -> list[str]:
    """Return a line for each rule that one of the ``subjects`` breaks."""
    return [f"{one!r}: {rule}" for one in subjects for rule in broken_rules(one)]


def main() -> None:
    """Check the commits after BASE."""
    base = sys.argv[1] if len(sys.argv) > 1 else FIRST_CHECKED_AFTER
    command = ("git", "log", "--no-merges", "--format=%s", f"{base}..HEAD")
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        print(f"subjects of commits are not checked: no git, or it lacks {base}")
        return
    subjects = listed.splitlines()
    if found := violations(subjects):
        sys.exit("\n".join(["subjects of commits:", *found]))
    print(f"subjects of commits: {len(subjects)} checked")


if __name__ == "__main__":
    main()
