"""The bench's arithmetic, on requests written by hand.

Oracle: the expected numbers are worked out in the comments, not by the code under test.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.bench.measurement import (
    Cell,
    GammaCost,
    Measurement,
    gamma_cost,
    summarise,
)
from edgespec.bench.prompts import Workload
from edgespec.bench.report import Subject, document, footer, verdict, write_json
from edgespec.bench.runner import (
    BenchSettings,
    arm_options,
    parse_arms,
    parse_rtts_ms,
    rotated,
)
from edgespec.core.device.events import DraftCounters
from edgespec.core.device.policy import FixedPolicy
from edgespec.core.protocol.messages import RunAhead

# Five tokens in three passes; the last one ended the text, so four count.
ONE = Measurement(
    tokens=(5, 6, 7, 8, 0),
    times_s=(0.1, 0.1, 0.2, 0.4),
    counters=DraftCounters(
        sent=8, committed=5, accepted=2, passes=3, tried=4, hits=3, verify_s=0.075
    ),
)
TWO = Measurement(
    tokens=(5, 6),
    times_s=(0.3, 0.5),
    counters=DraftCounters(
        sent=2, committed=2, accepted=0, passes=2, tried=1, hits=0, verify_s=0.05
    ),
)
TRAFFIC = {
    "drafted_nodes": 10.0,
    "up_payload_bytes": 150.0,
    "open_payload_bytes": 80.0,
    "up_framed_bytes": 200.0,
    "down_payload_bytes": 70.0,
    "down_framed_bytes": 90.0,
}


def cell(arm: Arm = Arm.EDGESPEC, repeat: int = 0, **changes: object) -> Cell:
    whole = Cell(arm, 20.0, repeat, (ONE, TWO), (ONE.tokens, TWO.tokens), TRAFFIC)
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_a_row_counts_what_it_says() -> None:
    row = cell().row()
    assert row["ttft_ms_p50"] == pytest.approx(200)  # 100 and 300
    assert row["tpot_ms_p50"] == pytest.approx(150)  # 300 / 3 and 200 / 1
    assert row["tpot_ms_p95"] == pytest.approx(195)
    assert row["itl_ms_p95"] == pytest.approx(200)  # 0, 100, 200, 200
    assert row["tokens"] == 6
    assert row["tokens_per_second"] == pytest.approx(6 / 0.9)
    assert row["passes_per_token"] == pytest.approx(5 / 7)
    assert row["tokens_per_pass"] == pytest.approx(7 / 5)
    assert row["acceptance"] == pytest.approx(3 / 5)
    assert row["wasted_nodes"] == 8
    assert row["pass_ms_mean"] == pytest.approx(25)
    assert row["up_bytes_per_token"] == pytest.approx(7)  # 150 - 80 over 10 drafted
    assert row["up_bytes_per_committed_token"] == pytest.approx(10)
    assert row["down_bytes_per_token"] == pytest.approx(10)
    assert row["open_bytes_per_request"] == pytest.approx(40)
    assert row["framing_bytes_per_committed_token"] == pytest.approx(10)  # 50 + 20 over 7
    assert row["mismatches"] == 0


def test_a_wrong_token_is_counted_and_said() -> None:
    wrong = cell(references=((5, 6, 7, 9, 0), TWO.tokens)).row()
    assert wrong["mismatches"] == 1
    assert verdict([cell().row(), wrong]) == (
        1,
        "1 of 12 tokens differ from target-only: they must not",
    )
    assert verdict([cell().row()]) == (0, "all 6 tokens are those of target-only")


def test_speeds_are_of_means_over_the_texts() -> None:
    """Two texts, the second of which one repeat never came to: plain 20 and 40 ms, ours 10 (of 8
    and 12) and 30. All draws of two texts lie between 20 / 10 and 40 / 30."""

    def row(arm: Arm, repeat: int, *tpots_ms: float | None) -> dict[str, object]:
        return {**cell(arm, repeat).row(), "tpots_ms": list(tpots_ms)}

    rows = [row(Arm.TARGET_ONLY, 0, 20.0, 40.0), row(Arm.EDGESPEC, 0, 8.0, 30.0)]
    rows += [row(Arm.TARGET_ONLY, 1, 20.0, None), row(Arm.EDGESPEC, 1, 12.0)]
    plain, ours = summarise(rows)
    assert (plain["tpot_ms_mean"], ours["tpot_ms_mean"]) == (30.0, 20.0)
    assert (plain["speedup"], ours["speedup"]) == (pytest.approx(1.0), pytest.approx(1.5))
    assert ours["interval"] == {"tpot_ms_mean": [10.0, 30.0], "speedup": [40 / 30, 2.0]}
    assert plain["interval"]["speedup"] == [1.0, 1.0]  # type: ignore[index]
    (alone,) = summarise([row(Arm.EDGESPEC, 0, 10.0)])
    assert (alone["speedup"], alone["interval"]) == (None, {"tpot_ms_mean": [10.0, 10.0]})
    (nothing,) = summarise([row(Arm.EDGESPEC, 0, None)])
    assert (nothing["tpot_ms_mean"], nothing["interval"]) == (None, {})


def test_a_draft_length_costs_its_requests_rounds() -> None:
    cost = gamma_cost([ONE, TWO])
    assert cost is not None
    assert (cost.rounds, cost.tokens) == (3, 4)
    assert cost.flow_s == pytest.approx(0.5)
    assert gamma_cost([Measurement((0,), (), DraftCounters())]) is None


def test_the_arms_are_settings_of_one_machine() -> None:
    assert [arm for arm in Arm if not arm.drafts] == [Arm.TARGET_ONLY]
    assert arm_options(Arm.VANILLA, 5).policy == FixedPolicy(5)
    waiting = [arm for arm in Arm if arm_options(arm).run_ahead is RunAhead.NEVER]
    assert waiting == [Arm.VANILLA, Arm.PEARL, Arm.WINDOWED]
    assert rotated((Arm.PEARL, Arm.VANILLA), 3) == (Arm.VANILLA, Arm.PEARL)


def test_lists_are_read_or_refused() -> None:
    assert parse_arms("edgespec, vanilla") == (Arm.EDGESPEC, Arm.VANILLA)
    assert parse_rtts_ms("2, 20.5") == (2.0, 20.5)
    with pytest.raises(ValueError, match="arm 'eagle' is unknown; there are target-only, vanilla"):
        parse_arms("eagle")
    with pytest.raises(ValueError, match="arms names pearl more than once"):
        parse_arms("pearl,vanilla,pearl")
    with pytest.raises(ValueError, match="arms is empty"):
        parse_arms(" , ")
    with pytest.raises(ValueError, match="rtt-ms is '2;3'"):
        parse_rtts_ms("2;3")
    with pytest.raises(ValueError, match="rtt-ms names 2 more than once"):
        parse_rtts_ms("2,2.0")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rtts_ms": (-1.0,)}, "rtt-ms is -1"),
        ({"rtts_ms": (float("nan"),)}, "rtt-ms is nan"),
        ({"repeats": 0}, "repeats is 0"),
        ({"prompt_limit": 0}, "limit is 0"),
        ({"max_tokens": 1}, r"max-tokens is 1, but must be in \[2"),
        ({"pass_ms": 1e9}, r"pass-ms is 1000000000.0, but must be in \[0.0, 60000.0\]"),
        ({"draft_ms": -0.5}, "draft-ms is -0.5"),
    ],
)
def test_settings_name_what_is_wrong(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BenchSettings(**changes)  # type: ignore[arg-type]


def test_the_document_is_complete_json(tmp_path: Path) -> None:
    subject = Subject("bundled", "bundled", "t", "d", "built-in", False)
    workload = Workload(("a", "b"), ((1, 2), (3,)), frozenset({0}))
    rows = [cell().row()]
    content = document(
        ("edgespec", "bench", "--json", "my file"),
        BenchSettings(),
        subject,
        workload,
        rows,
        {20.0: 4},
        {4: GammaCost(1.5, 20, 60)},
        interrupted=True,
    )
    path = tmp_path / "deep" / "result.json"
    write_json(path, content)
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read["command"] == "edgespec bench --json 'my file'"
    assert {"machine", "versions", "settings", "results", "summary"} <= set(read)
    assert read["settings"]["timing"].startswith("emulated pass time")
    assert read["settings"]["vanilla_gamma"] == {"20": 4}
    assert read["settings"]["vanilla_sweep"]["4"]["rounds"] == 20
    assert read["settings"]["prompt_tokens"] == [2, 1]
    assert read["interrupted"] is True
    assert read["results"][0]["arm"] == "edgespec"
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    lines = "\n".join(footer(content))
    for said in ("emulated pass time", "4 at 20 ms", "machine:", "python", "command: edgespec"):
        assert said in lines


@pytest.mark.parametrize(("tpot_ms", "late"), [(26.5, False), (28.8, True), (None, False)])
def test_passes_that_took_longer_than_asked_are_told(tpot_ms: float | None, late: bool) -> None:
    subject = Subject("bundled", "bundled", "t", "d", "built-in", False)
    content = document(("edgespec",), BenchSettings(), subject, None, [], {}, {}, interrupted=False)
    if tpot_ms is not None:
        content["summary"] = [
            {"arm": "target-only", "rtt_ms": 2.0, "tpot_ms_mean": 25.0},
            {"arm": "target-only", "rtt_ms": 50.0, "tpot_ms_mean": tpot_ms},
            {"arm": "edgespec", "rtt_ms": 50.0, "tpot_ms_mean": 90.0},
        ]
    told = [line for line in footer(content) if line.startswith("late: ")]
    assert [f"took up to {tpot_ms} ms a token" in line for line in told] == [True] * late
