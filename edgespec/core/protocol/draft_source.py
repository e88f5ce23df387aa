"""Draft sources: where the candidates of a speculation tree come from, on both ends.

Theory of operation. A draft node costs a row of the next pass and saves a token if the target
accepts it (``docs/price-of-a-row.md``). Several sources may propose nodes for one generation. Each
source knows three things: its candidates, the chance of each candidate to be accepted, and what a
further candidate costs. What a row costs is known to the code that merges the sources into one
tree, which hands the price to them in a *view*. So the merging code calls the members below and
needs to know nothing else of a source:

    add_nodes   before a pass, or after an event of a device: put the candidates that are worth a
                row into the tree, each with its chance
    learn       after a verdict: update the chances

    source             file in ``core``              candidates come from
    device model       device/device_model.py        steps of the device's draft model
    device lookup      device/device_lookup.py       the text, and earlier texts of the user
    prediction         device/device_prediction.py   text that the client expects the output to be
    device             verifier/draft_inbox.py       messages: a device's nodes at a verifier
    server model       verifier/server_model.py      rounds of the verifier's draft model
    engine speculator  verifier/server_model.py      the engine, behind each pass
    server lookup      verifier/server_drafts.py     the text, and texts of the same credential

**The chance** of a candidate is its probability to be the target's token if all nodes before it
are. It comes from counts of the source's own verdicts that fade, by whatever the source knows of
the candidate: its rank, the draft model's confidence, the length of a match. A prior of little
weight stands for what was never tried, so that it is tried.

**Cost.** A source that computes (``SteppedSource``) also states what its next candidate would cost
and how likely it would be accepted, because a step has to be judged before its candidate is known.
A source without steps reads its candidates from memory, which costs nothing that could be measured
beside a pass.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol, TypeVar

ViewT_contra = TypeVar("ViewT_contra", contravariant=True)
VerdictT_contra = TypeVar("VerdictT_contra", contravariant=True)


class SourceKind(Enum):
    """Kind of a draft source. The values are the words of ``docs/glossary.md``."""

    DEVICE_MODEL = "device model"
    DEVICE_LOOKUP = "device lookup"
    PREDICTION = "prediction"
    """Text that the client expects the output to be."""
    DEVICE = "device"
    """Nodes that arrived at the verifier in a draft: a device does not send their sources."""
    SERVER_MODEL = "server model"
    ENGINE_SPECULATOR = "engine speculator"
    SERVER_LOOKUP = "server lookup"
    """Text lookup on the verifier, and tokens that a grammar forces."""


class DraftSource(Protocol[ViewT_contra, VerdictT_contra]):
    """A source of draft nodes for one generation.

    Each end has its own view and verdict: ``policy.DraftView`` and ``policy.JudgedPlace`` on a
    device, ``pass_tree.PassView`` and ``pass_tree.PassVerdict`` on a verifier. Neither method
    waits, computes a model or raises: a source that fails has no candidates."""

    @property
    def kind(self) -> SourceKind:
        """Kind of the source, by which its nodes are counted."""

    def add_nodes(self, view: ViewT_contra) -> None:
        """Add the candidates that are there and worth a row to the view's tree.

        Each node gets its chance. The nodes respect the view's bounds on number and depth. A token
        that another source has added at the same place stays one node. Candidates are judged later
        whether they were worth a row or not, so a source that was wrong for a while costs no rows
        until it is right again."""

    def learn(self, verdict: VerdictT_contra) -> None:
        """Update the estimated chances from a verdict, and drop the candidates that it killed.

        Every verdict on the generation's tokens is passed to every source once, in order, before
        the next ``add_nodes``. A source that reads the committed text itself may judge its
        candidates there instead, when it next adds nodes."""


class SteppedSource(DraftSource[ViewT_contra, VerdictT_contra], Protocol):
    """A draft source whose candidates cost steps. Whether the next step pays is decided from these
    two members, before its candidate is known. Steps run elsewhere: the driver hands their
    candidates to the source, which adds them with the next ``add_nodes``."""

    @property
    def acceptance_rate(self) -> float:
        """Estimated probability, above 0 and below 1, that the next candidate is accepted if the
        nodes before it are; from the source's verdicts, whatever its confidence."""

    def step_s(self, pass_s: float) -> float:
        """Return the seconds that one more step takes, beside its rows. Until steps were timed, a
        share of ``pass_s``, the duration of a pass, is assumed (``ASSUMED_STEP_SHARE``)."""
