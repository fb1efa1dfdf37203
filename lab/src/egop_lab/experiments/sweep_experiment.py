"""Experiments with two sweeps: tuning trials choose a rate in original coordinates, reported trials are judged."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from egop_lab.experiments.base import Experiment, Judgement, to_verdict
from egop_lab.training.batched import ORIGINAL
from egop_lab.training.records import Record
from egop_lab.training.tuning import best_rate, is_tuning


class SweepExperiment(Experiment):
    """Experiment in which the learning rate of original coordinates is also used in EGOP coordinates.

    The paper chooses it on the trials that it reports. Here tuning trials choose the one of the figures; claims are
    judged by both.
    """

    @abc.abstractmethod
    def score(self, result: Mapping[str, Any]) -> float:
        """Return the score that chooses a learning rate, median over trials; the smaller the better."""

    def choose_rate(self, optimizer: str, *, separate: bool = True) -> float:
        """Return the rate with the best score on the tuning trials or, if not ``separate``, on the reported ones."""
        runs = self.records(optimizer=optimizer, coordinates=ORIGINAL)
        return best_rate([run for run in runs if is_tuning(run) == separate], self.score)

    def fresh_runs(self, optimizer: str, coordinates: str) -> list[Record]:
        """Return the runs on reported trials, at all rates."""
        runs = self.records(optimizer=optimizer, coordinates=coordinates)
        return [run for run in runs if not is_tuning(run)]

    def reported_runs(self, optimizer: str, coordinates: str, *, separate: bool = True) -> list[Record]:
        """Return the runs on reported trials, at the chosen rate."""
        rate = self.choose_rate(optimizer, separate=separate)
        return [run for run in self.fresh_runs(optimizer, coordinates) if run.config["lr"] == rate]


def judge_by_both_rules(judge: Callable[[bool], Judgement]) -> Judgement:
    """Judge a claim at the rates of the paper's rule; at those of tuning trials as an alternative if they differ."""
    paper, ours = judge(False), judge(True)
    if (paper.verdict, paper.finding) == (ours.verdict, ours.finding):
        return paper
    return paper.add_alternative("rates chosen on tuning trials of their own", ours)


def judge_mostly(id: str, words: str, better: Sequence[bool]) -> Judgement:
    """Judge a claim that is to hold rate by rate, or epoch by epoch."""
    finding = f"Lower at {sum(better)} of {len(better)} learning rates."
    threshold = "at more than three quarters of them"
    return Judgement(id, words, to_verdict(sum(better) > 0.75 * len(better)), finding, threshold=threshold)
