"""``python -m edgespec_uara.train``: train the resource allocation and write it as arrays.

The number of updates and the seed decide the result; ``--minutes`` only cuts it short. Ctrl-C
keeps the best policy so far. Judged now and then on worlds that neither training nor the sweep
sees, by what the optimal shares would cost for the same association: 1 is optimal.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from edgespec_uara.cost import (
    CorrectedCost,
    CostModel,
    PaperCost,
    Terms,
    Weights,
    objective,
    optimal,
)
from edgespec_uara.methods import SHIPPED, Actor, best_gain, masac_shares, two_phase_matching
from edgespec_uara.world import Floats, Ints, UaraSettings, UaraWorld

POLICIES = Path(__file__).parent / "policies"
CAPACITY = 6000
WARM_UP = 40
"""Episodes before the first update."""
UPDATES_PER_EPISODE = 8
JUDGED_EVERY = 400
"""Updates."""
BYTES_MAX = 200_000
_EXAM = ((30, 4), (90, 12), (60, 20), (120, 8), (150, 4), (180, 20))
_EXAM_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class Question:
    """One judged situation."""

    terms: Terms
    association: Ints
    optimum: float


def exam(costs: tuple[CostModel, ...]) -> list[Question]:
    """Fixed worlds of the paper's sizes, associated by two-phase matching."""
    questions = []
    for index, (devices, servers) in enumerate(_EXAM):
        for cost in costs:
            settings = UaraSettings(devices=devices, servers=servers)
            now = UaraWorld(settings, _EXAM_SEED + index).snapshot
            terms = cost.terms(now)
            matched = two_phase_matching(terms, Weights.even(terms), best_gain(now.gains))
            optimum = objective(terms, optimal(terms, matched.association))
            questions.append(Question(terms, matched.association, optimum))
    return questions


def judge(actor: Actor, questions: list[Question]) -> float:
    """Mean of cost over the optimal shares' cost; 1 is optimal."""
    ratios = [
        objective(question.terms, masac_shares(actor, question.terms, question.association))
        / question.optimum
        for question in questions
    ]
    return float(np.mean(ratios))


@dataclass(slots=True)
class Training:
    """One run of the learner, and the best policy it has seen."""

    seed: int
    updates: int
    minutes: float
    best: dict[str, Floats] | None = None
    score: float = float("inf")
    done: int = 0
    seconds: float = 0.0

    def run(self, console: Console) -> None:
        from edgespec_uara.masac.learner import (
            Learner,
            LearnerSettings,
            Replay,
            Rollout,
            one_thread,
        )

        one_thread()
        costs = (PaperCost(), CorrectedCost())
        settings = LearnerSettings()
        learner, rollout = Learner(settings, self.seed), Rollout(costs, self.seed)
        replay = Replay(CAPACITY, np.random.default_rng(self.seed))
        for _ in range(WARM_UP):
            for transition in rollout.episode(learner.actor):
                replay.add(transition)
        questions, began = exam(costs), time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("training", total=self.updates)
            while self.done < self.updates and self.seconds < 60 * self.minutes:
                for transition in rollout.episode(learner.actor):
                    replay.add(transition)
                for _ in range(UPDATES_PER_EPISODE):
                    learner.update(replay.draw(settings.batch))
                    self.done += 1
                    if self.done % JUDGED_EVERY == 0:
                        self._keep(learner.arrays(), judge(Actor(learner.arrays()), questions))
                        said = f"temperature {learner.temperature:.4f}, best {self.score:.4f}"
                        progress.update(task, description=f"{self.done} updates, {said}")
                learner.slow_down(max(0.05, 1.0 - self.done / self.updates))
                self.seconds = time.monotonic() - began
                progress.update(task, completed=self.done)

    def _keep(self, arrays: dict[str, Floats], score: float) -> None:
        if score < self.score:
            self.best, self.score = arrays, score

    def write(self, path: Path) -> None:
        """``PATH.npz`` and its card ``PATH.json``."""
        from edgespec_uara.masac.learner import LearnerSettings

        if self.best is None:
            raise ValueError(f"nothing to keep yet: the first exam comes at {JUDGED_EVERY} updates")
        path.parent.mkdir(parents=True, exist_ok=True)
        archive = path.with_suffix(".npz")
        small = {name: array.astype(np.float32) for name, array in self.best.items()}
        np.savez_compressed(archive, **small)  # type: ignore[arg-type]
        if archive.stat().st_size > BYTES_MAX:
            raise ValueError(f"{archive}: {archive.stat().st_size} bytes, at most {BYTES_MAX}")
        text = {
            "method": "multi-agent soft actor-critic, an agent a server, shared actor",
            "seed": self.seed,
            "updates": self.done,
            "seconds": round(self.seconds),
            "cost_over_optimal_shares": round(self.score, 4),
            "learner": asdict(LearnerSettings()),
        }
        card = json.dumps(text, indent=1) + "\n"
        path.with_suffix(".json").write_text(card, encoding="utf-8")


def main(
    seed: int = 0,
    updates: Annotated[int, typer.Option(min=JUDGED_EVERY)] = 16_000,
    minutes: Annotated[float, typer.Option(help="Stop after so long, done or not")] = 20.0,
    out: Annotated[Path, typer.Option(help="Where to write, without an ending")] = (
        POLICIES / SHIPPED
    ),
) -> None:
    """Train, and keep the best policy seen."""
    console = Console()
    training = Training(seed, updates, minutes)
    try:
        training.run(console)
    except KeyboardInterrupt:
        console.print("stopped: keeping the best so far")
    training.write(out)
    console.print(
        f"{training.done} updates in {training.seconds:.0f} s; on worlds apart its shares cost "
        f"{training.score:.4f} of the optimal ones; wrote {out.with_suffix('.npz')}"
    )


if __name__ == "__main__":
    typer.run(main)
