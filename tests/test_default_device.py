"""Results do not depend on torch's default device: every tensor that the library makes says where it is made."""

import ast
import contextlib
import copy
from pathlib import Path

import pytest
import torch

import cases
import egop

PACKAGE = Path(egop.__file__).parent

# The functions whose result `torch.set_default_device` moves if they get no `device=`.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor"),
    *("sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def find_factory_calls_without_device(source):
    """Return the lines that call a tensor factory without ``device=``."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_tensor_factory_names_its_device():
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "checkpoint")
    found = {
        path.relative_to(PACKAGE).as_posix(): find_factory_calls_without_device(path.read_text(encoding="utf-8"))
        for path in files
    }
    assert len(files) > 50
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_the_search_finds_a_factory_without_device():
    source = "a = torch.zeros(3)\nb = torch.zeros(3, device=a.device)\nc = torch.zeros_like(a)\nd = torch.rand(\n2)\n"
    assert find_factory_calls_without_device(source) == [1, 4]


# With fused=True torch's optimizers keep all of their state with the parameters, whatever the default device is.
FUSED = torch.optim.AdamW, {"fused": True}


def wrap(model, basis=None, **options):
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=0.01, fused=True, **options)


OPTIMIZERS = {
    "EGOP": lambda model, objective: egop.EGOP(model, lr=0.01, every=3, fused=True),
    "Online": lambda model, objective: wrap(model, refresh=egop.Online(every=3, structure=egop.Kronecker())),
    "drifted": lambda model, objective: wrap(model, refresh=egop.Online(every=2, tolerance=0.01)),
    "Aligned": lambda model, objective: egop.ReparameterizedOptimizer(
        model, egop.optim.Sinkhorn, refresh=egop.Aligned(), outside=FUSED, lr=0.01
    ),
    "Every": lambda model, objective: wrap(model, refresh=egop.Every(3, objective, samples=10)),
    "estimate": lambda model, objective: wrap(model, cases.estimate(objective, partition="global")),
    "Auxiliary": lambda model, objective: wrap(model, cases.estimate(objective, structure=egop.Auxiliary(rank=3))),
    "sketched": lambda model, objective: wrap(
        model, cases.estimate(objective, structure=egop.Reduced(rank=2, keep_rest=False), rho=egop.Ball(1.0))
    ),
    "RandomRotation": lambda model, objective: wrap(
        model, cases.estimate(objective, structure=egop.extras.RandomRotation(seed=1))
    ),
}


def train(model, optimizer, default, steps=5):
    for batch in cases.MLP.batches(steps):
        cases.cross_entropy(model, move(batch, model)).backward()
        with default():
            optimizer.step()
            optimizer.zero_grad()


def move(batch, model):
    return tuple(tensor.to(next(model.parameters()).device) for tensor in batch)


def train_and_resume(make, default, device="cpu"):
    """Train, save and resume with every call of the library under a default device; return the weights and the text."""
    models = [cases.MLP.build().to(device) for _ in range(2)]
    objectives = [cases.MLP.objective(model) for model in models]
    with default():
        first, second = map(make, models, objectives)
    train(models[0], first, default)
    with default():
        state = copy.deepcopy(first.state_dict())
        second.load_state_dict(state)
        if isinstance(first, egop.ReparameterizedOptimizer):
            first.rebase(second.basis)
        text = str(first)
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, default)
    return [parameter.detach().cpu() for model in models for parameter in model.parameters()], text


def check_training(make, default, device="cpu"):
    weights, text = train_and_resume(make, contextlib.nullcontext, device)
    same_weights, same_text = train_and_resume(make, default, device)
    assert all(map(torch.equal, weights, same_weights))
    assert text == same_text


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same_under_another_default_device(name):
    check_training(OPTIMIZERS[name], lambda: torch.device("meta"))


@contextlib.contextmanager
def default_cuda():
    torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same_when_a_gpu_is_the_default_device(name, device):
    check_training(OPTIMIZERS[name], default_cuda, device)


def analyze(objective, default, folder):
    """Estimate, save and load a basis, and look for a learning rate, under a default device."""
    with default():
        cases.estimate(objective, structure=egop.Shared()).save(folder / "basis.safetensors")
        basis = egop.Basis.load(folder / "basis.safetensors")
        found = egop.find_lr(
            objective, lambda model: egop.EGOP(model, fused=True), steps=4, rates=[0.001, 0.01], progress=False
        )
        return [*found.tried.values(), *((name, change.dense().tolist()) for name, change in basis.items())]


def test_a_basis_and_a_learning_rate_are_the_same_under_another_default_device(tmp_path):
    expected = analyze(cases.MLP.objective(), contextlib.nullcontext, tmp_path)
    assert analyze(cases.MLP.objective(), lambda: torch.device("meta"), tmp_path) == expected


@pytest.mark.slow
def test_a_diagnosis_is_the_same_under_another_default_device():
    model = cases.MLP.build()
    try:
        train(model, torch.optim.AdamW(model.parameters()), lambda: torch.device("meta"), steps=1)
    except RuntimeError:  # torch 2.11 keeps the count of steps there
        pytest.skip("torch's own AdamW depends on the default device")
    results = []
    for default in (contextlib.nullcontext, lambda: torch.device("meta")):
        objective = cases.MLP.objective()
        with default():
            diagnosis = egop.diagnose(objective, steps=20, seeds=(0,), progress=False)
        results.append({name: [run.losses for run in runs] for name, runs in diagnosis.race.runs[0].items()})
    assert results[0] == results[1]
