"""Performance targets as data, and whether they are met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from egop_lab.bench import epoch, host, setups

Parts = Mapping[str, Sequence[Mapping[str, Any]]]  # rows by part of the benchmark


@dataclass(frozen=True)
class Target:
    """A bound on one ratio.

    Attributes:
        id: a short name.
        words: the measured quantity.
        sense: which side of the bound is good.
        bound: the bound on the ratio.
        kind: the kind of device it applies to; None for both.
        find: finds the ratio in the rows; None if it was not measured.
    """

    id: str
    words: str
    sense: Literal["at most", "at least"]
    bound: float
    kind: Literal["cpu", "cuda"] | None
    find: Callable[[Parts], float | None]

    def evaluate(self, parts: Parts, kind: str) -> dict[str, Any]:
        """Return the target with the measured value."""
        measured = self.find(parts) if self.kind in (None, kind) else None
        row = {"id": self.id, "words": self.words, "target": f"{self.sense} {self.bound:g}", "measured": measured}
        if measured is None:
            elsewhere = self.kind not in (None, kind)
            return row | {"verdict": f"not measured{f' (needs {_DEVICES[self.kind]})' if elsewhere else ''}"}
        met = measured <= self.bound if self.sense == "at most" else measured >= self.bound
        return row | {"verdict": "met" if met else "missed"}


_DEVICES = {"cpu": "a CPU", "cuda": "a GPU", None: "nothing"}


def _value(part: str, key: str, **wanted: str) -> Callable[[Parts], float | None]:
    def find(parts: Parts) -> float | None:
        for row in parts.get(part, ()):
            if all(row.get(name) == value for name, value in wanted.items()):
                return row.get(key)
        return None

    return find


def _sampling(kind: Literal["cpu", "cuda"], bound: float, where: str) -> Target:
    find = _value("sampling", "vmap over loop", network="digits MLP", rho="Initialization")
    return Target(f"sampling-{kind}", f"vmapped over loop sampling, digits MLP, {where}", "at least", bound, kind, find)


def _whole(id: str, words: str, bound: float, method: str) -> Target:
    find = _value("steps", "whole over AdamW", network="GPT 6x384", method=method)
    return Target(id, f"whole training step over AdamW, GPT 6x384, GPU, {words}", "at most", bound, "cuda", find)


def _epoch(id: str, words: str, bound: float, method: str, form: str) -> Target:
    find = _value("epoch", "epoch over AdamW", network="ResNet-34", form=form, method=method)
    return Target(id, f"whole epoch over AdamW, ResNet-34, GPU, {words} ({form})", "at most", bound, "cuda", find)


def _soap() -> Iterator[Target]:
    """Return the targets against SOAP on every measured network."""
    networks: list[tuple[str, Literal["cpu", "cuda"] | None]] = [
        ("MLP 784-1024-1024-10", None),
        ("ResNet-34, width 32", "cpu"),
        ("ResNet-34", "cuda"),
        ("GPT 6x384", None),
        ("GPT 12x768", "cuda"),
    ]
    for structure, bound, method in (
        ("Shared", 3.0, setups.SHARED_ONLINE),
        ("Kronecker", 2.0, setups.KRONECKER_ONLINE),
    ):
        for network, kind in networks:
            find = _value("steps", "SOAP over step", network=network, method=method)
            words = f"SOAP's step over {structure}'s at the same cadence, {network}"
            yield Target(f"soap-{structure.lower()}", words, "at least", bound, kind, find)


def _host(id: str, words: str, bound: float, method: str, key: str = "step over AdamW") -> Target:
    return Target(id, f"{words}, seven small linear layers", "at most", bound, None, _value("host", key, method=method))


TARGETS: list[Target] = [
    _host("host-egop", "host time of an EGOP step over AdamW's", 2, host.FULL),
    _host("host-fixed", "host time of a step in a fixed Shared basis over AdamW's", 1.4, host.FIXED),
    _host("host-calls", "calls of egop's functions in an EGOP step", 150, host.FULL, "calls"),
    _host("host-files", "files that an EGOP step goes through", 12, host.FULL, "files"),
    _sampling("cpu", 3, "2 CPU cores"),
    _sampling("cuda", 30, "GPU"),
    _whole("gpt-online", "Shared online", 1.15, setups.SHARED_ONLINE),
    _whole("gpt-fixed", "Shared fixed", 1.08, setups.SHARED),
    *(_epoch("resnet-fixed", "Shared fixed", 1.10, epoch.FIXED, form) for form in (epoch.EAGER, epoch.GRAPH)),
    *(
        _epoch("resnet-renewed", "Shared each epoch", 1.20, epoch.EACH_EPOCH, form)
        for form in (epoch.EAGER, epoch.GRAPH)
    ),
    *_soap(),
    Target(
        "floor",
        "step over the floor of its basis products, GPT 12x768, GPU, Shared fixed",
        "at most",
        2,
        "cuda",
        _value("steps", "step over floor", network="GPT 12x768", method=setups.SHARED),
    ),
    *(
        Target(
            "sweep",
            f"digits sweep, one run at a time over all together, 2 CPU cores, {coordinates} coordinates",
            "at least",
            10,
            "cpu",
            _value("sweep", "speed-up", coordinates=coordinates),
        )
        for coordinates in ("original", "EGOP")
    ),
]


def judge(parts: Parts, kind: str) -> list[dict[str, Any]]:
    """Compare every target for this kind of device with its measured value."""
    return [target.evaluate(parts, kind) for target in TARGETS]
