"""The experiments by id, in the order of the paper."""

from importlib import import_module

from egop_lab.experiments.base import Experiment

# Imported on demand, so that an experiment with a missing package does not keep the others from running.
_PLACES = {
    "trajectories": "trajectories:TrajectoriesExperiment",
    "digits": "digits:DigitsExperiment",
    "digits-spectrum": "digits_spectrum:DigitsSpectrumExperiment",
    "digits-density": "digits_spectrum:DigitsDensityExperiment",
    "layer-spectra": "layer_spectra:LayerSpectraExperiment",
    "linear-networks": "linear_networks:LinearNetworksExperiment",
    "errors-in-variables": "errors_in_variables:ErrorsInVariablesExperiment",
    "matrix-factorization": "matrix_factorization:MatrixFactorizationExperiment",
    "convex": "convex:ConvexExperiment",
    "fashion-mnist": "fashion_mnist:FashionMnistExperiment",
    "resnet": "resnet:ResnetExperiment",
    "alexnet": "alexnet:AlexNetExperiment",
    "sample-size": "sample_size:SampleSizeExperiment",
    "assumptions": "assumptions:AssumptionsExperiment",
    "controls": "controls:ControlsExperiment",
    "advice": "advice:AdviceExperiment",
}

IDS: tuple[str, ...] = tuple(_PLACES)


def find_experiment(id: str) -> type[Experiment]:
    """Return the experiment with an id."""
    module, name = _PLACES[id].split(":")
    found: type[Experiment] = getattr(import_module(f"egop_lab.experiments.{module}"), name)
    return found
