"""The EGOP spectra of single layers, on the UCI digits and on a small Fashion-MNIST."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import egop
from egop_lab.data.batches import Batches, Split
from egop_lab.data.digits import digits
from egop_lab.data.fashion import fashion_folder, fashion_mnist, four_classes
from egop_lab.experiments.base import Experiment, Judgement, to_verdict
from egop_lab.models.small import cross_entropy, digits_network, normal_, perceptron, xavier_
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context
from egop_lab.training.spectra import decay, subsample

_BATCH = 300
_DATA = {"digits": "UCI digits", "fashion": "Fashion-MNIST"}
_LAYERS = {"0.weight": "first layer", "2.weight": "second layer"}
_PLACES = (0.25, 0.5)  # parts of a layer's eigenvalues at which decay is compared
_FLOOR = 1e-12  # rounding of float32 gradients
XAVIER, NORMAL = "Xavier", "N(0, 1)"  # how weights are drawn


class LayerSpectraExperiment(Experiment):
    """One EGOP matrix for each weight matrix, at the network's initialisation."""

    id: ClassVar[str] = "layer-spectra"

    def run(self, context: Context) -> None:
        self.do_missing(self._configs(), lambda config: measure(config, context), context.device)

    def judge(self) -> list[Judgement]:
        found = self._load_results()
        digits, ours = found.get(("digits", XAVIER)), found.get(("fashion", XAVIER))
        fashion = found.get(("fashion", NORMAL), ours)
        judged = [_judge_faster("digits", digits)] if digits else []
        if fashion:
            judged.append(
                _add_digits_start(_judge_faster("fashion", fashion), _judge_faster("fashion", ours) if ours else None)
            )
        if digits and fashion:
            judged.append(
                _add_digits_start(_judge_similar(digits, fashion), _judge_similar(digits, ours) if ours else None)
            )
        return judged

    def pictures(self) -> list[Picture]:
        found = self._load_results()
        panels = [
            Panel(
                f"{words}, {layer_words}",
                "k",
                "λₖ/λ₁",
                [_series(rho, result[layer]) for rho in (XAVIER, NORMAL) if (result := found.get((data, rho)))],
            )
            for data, words in _DATA.items()
            if (data, XAVIER) in found
            for layer, layer_words in _LAYERS.items()
        ]
        caption = "λₖ/λ₁ of the EGOP matrix of each weight matrix, at points drawn as networks are initialised."
        return [Picture("layer-spectra", caption, panels)]

    def _configs(self) -> list[dict[str, Any]]:
        samples = self.settings["samples per dimension"]
        common = {"samples_per_dimension": samples, "seed": 0}
        xavier = [self.config(data=data, **common) for data in _DATA]
        return [*xavier, self.config(data="fashion", rho=NORMAL, **common)]

    def _load_results(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """Return the results by data and distribution."""
        records = [self.store.get(config) for config in self._configs()]
        return {(r.config["data"], r.config.get("rho", XAVIER)): r.result for r in records if r is not None}


def _load_problem(data: str, context: Context) -> tuple[nn.Module, Split]:
    if data == "digits":
        return digits_network(), digits().train
    # The paper's max-pooling layer has no parameters, so the images are pooled once, up front.
    train = four_classes(fashion_mnist(context.data)).train
    context.say(f"images: {fashion_folder(context.data)}")
    return perceptron(196, 20, 4), train


def measure(config: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Estimate the EGOP matrix of each layer; return some of the eigenvalues."""
    network, train = _load_problem(config["data"], context)
    init, seed = normal_ if config.get("rho") == NORMAL else xavier_, config["seed"]
    size = sum(parameter.numel() for parameter in network.parameters())
    network = network.to(context.device)
    tensors = [tensor.to(context.device) for tensor in train.batch]
    batches = Batches(*tensors, size=_BATCH, generator=torch.Generator().manual_seed(seed + 1))
    basis = egop.estimate(
        egop.Objective(network, cross_entropy, batches),
        rho=egop.Initialization(init_fn=init),
        partition="layer",
        structure=egop.Full(),
        samples=math.ceil(config["samples_per_dimension"] * size),
        generator=torch.Generator().manual_seed(seed),
        progress=context.progress,
    )
    return {
        layer: {**subsample(spectrum.eigenvalues.tolist(), leading=50), "stable rank": spectrum.stable_rank}
        for layer, spectrum in basis.spectrum.items()
    }


def _decay_at(result: Mapping[str, Any], part: float) -> float:
    """Return λ_k/λ₁ at the first recorded k beyond a share of the dimension."""
    place = next(k for k in result["index"] if k >= part * result["dimension"])
    return decay(result, [place])[0]


def _series(words: str, result: Mapping[str, Any]) -> Series:
    return Series(words, result["index"], decay(result, result["index"]), method=words)


def _judge_faster(data: str, result: Mapping[str, Any]) -> Judgement:
    first, second = (result[layer] for layer in _LAYERS)
    pairs = {part: (_decay_at(first, part), _decay_at(second, part)) for part in _PLACES}
    shown = "; ".join(f"at k = {part:g} d: {first:.1e} and {second:.1e}" for part, (first, second) in pairs.items())
    shares = " and ".join(f"{layer['stable rank'] / layer['dimension']:.3f}" for layer in (first, second))
    return Judgement(
        f"layer-spectra/{data}",
        f"{_DATA[data]}: the first layer's spectrum decays faster than the second's.",
        to_verdict(all(first < second for first, second in pairs.values())),
        f"λₖ/λ₁ of the first and the second layer, d being the layer's own size, {shown}; stable rank/d: {shares}.",
    )


def _judge_similar(one: Mapping[str, Any], other: Mapping[str, Any]) -> Judgement:
    """Compare at equal shares of each layer's size, and only where both are above rounding."""
    first = next(iter(_LAYERS))
    pairs = [(_decay_at(one[first], part), _decay_at(other[first], part)) for part in np.linspace(0.01, 1, 100)]
    gap = float(np.median([abs(np.log10(a / b)) for a, b in pairs if min(a, b) > _FLOOR]))
    return Judgement(
        "layer-spectra/similar",
        "The decay in the first layer is strikingly similar for both data sets.",
        to_verdict(gap < 0.5),
        f"λₖ/λ₁ at equal k/d differ by a factor of {10**gap:.2g} in the median.",
        threshold="strikingly similar: within half a decade",
        margin=None if gap < 0.5 else -gap,
    )


def _add_digits_start(judged: Judgement, ours: Judgement | None) -> Judgement:
    """Add the result for the digits' initialisation to that for Fashion-MNIST's own."""
    if ours is None or ours.finding == judged.finding:
        return judged
    return judged.add_alternative("weights drawn as the digits network's, Xavier", ours)
