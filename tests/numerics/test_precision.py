"""Products are precise inside a scope, and all settings of torch are restored after it.

Tests that change settings run in a process of their own, because some settings cannot be restored.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import cases
import egop
from egop.numerics import precision
from processes import run

BACKENDS = ("cuda", "mkldnn")
SETTINGS = [("generic", "all"), *((backend, kind) for backend in BACKENDS for kind in ("all", "matmul", "conv", "rnn"))]

# The public attributes do not reach all settings.
read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter

# The last one sets convolutions, which cannot be undone.
SITUATIONS = {
    "nothing set": {},
    "inherited from the global setting": {"generic all": "tf32"},
    "inherited from the backend": {"cuda all": "tf32", "mkldnn all": "bf16"},
    "matrices set": {"cuda matmul": "tf32", "mkldnn matmul": "bf16"},
    "matrices set to the global value": {"generic all": "tf32", "cuda matmul": "tf32", "mkldnn matmul": "tf32"},
    "matrices set to the backend's value": {"cuda all": "tf32", "cuda matmul": "tf32", "mkldnn all": "tf32"},
    "matrices set to full precision": {"generic all": "tf32", "cuda matmul": "ieee", "mkldnn matmul": "ieee"},
    "everything set": {f"{backend} {kind}": "tf32" for backend, kind in SETTINGS},
}


@contextlib.contextmanager
def set_precision(situation):
    names = {tuple(name.split()): value for name, value in SITUATIONS[situation].items()}
    for name, value in names.items():
        write(*name, value)
    yield
    for name in names:
        write(*name, "none")


def read_settings():
    """Read every setting, now and under other global values, which shows what inherits from what."""
    shown = [{setting: read(*setting) for setting in SETTINGS}]
    for value in ("ieee", "tf32"):
        with torch.backends.flags(fp32_precision=value):
            shown.append({setting: read(*setting) for setting in SETTINGS})
    return shown


def check_scopes():
    for situation in SITUATIONS:
        with set_precision(situation):
            before = read_settings()
            for scope, kinds in (
                (precision.exact_products, ["matmul"]),
                (precision.full_precision, ["matmul", "conv", "rnn"]),
            ):
                with contextlib.suppress(ZeroDivisionError), scope():
                    inside = {read(backend, kind) for backend in BACKENDS for kind in kinds}
                    assert inside <= {"ieee", "none"}, (situation, inside)
                    raise ZeroDivisionError
                assert read_settings() == before, situation


def train():
    """Run an estimate, steps and a rebase, in every way that asks for full precision."""
    model = cases.MLP.build()
    objective = egop.Objective(model, cases.cross_entropy, cases.MLP.batches())
    basis = egop.estimate(objective, samples=64, progress=False, sampling="vmap")
    for refresh in (egop.Online(every=1), egop.Every(1, objective, samples=8)):
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis, lr=1e-3, refresh=refresh)
        for _ in range(3):
            optimizer.zero_grad()
            cases.cross_entropy(model, cases.MLP.batches()[0]).backward()
            optimizer.step()
        optimizer.rebase(basis)


def check_training_restores_settings():
    for situation in (
        "nothing set",
        "inherited from the global setting",
        "inherited from the backend",
        "matrices set to the global value",
    ):
        with set_precision(situation):
            before = read_settings()
            train()
            assert read_settings() == before, situation
    torch.backends.fp32_precision = "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "tf32"


def train_with_frozen_flags():
    torch.backends.fp32_precision = "tf32"
    torch.backends.disable_global_flags()
    train()


def call(rank, world, function):
    function()


def run_in_new_process(function):
    run(call, 1, function)


def test_scopes_are_precise_and_restore_inheritance():
    run_in_new_process(check_scopes)


def test_training_and_estimation_restore_inheritance():
    run_in_new_process(check_training_restores_settings)


def test_steps_and_vmapped_sampling_work_with_frozen_flags():
    run_in_new_process(train_with_frozen_flags)


def check_products_on_gpu():
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).cuda()
    images = x.reshape(1, 1, 512, 512)
    kernel = torch.randn(64, 1, 7, 7, generator=torch.Generator().manual_seed(1)).cuda()

    def errors():
        convolved = (
            torch.nn.functional.conv2d(images, kernel),
            torch.nn.functional.conv2d(images.double(), kernel.double()),
        )
        pairs = ((x @ x, x.double() @ x.double()), convolved)
        return [((one - other).norm() / other.norm()).item() for one, other in pairs]

    for situation in ("inherited from the global setting", "inherited from the backend", "matrices set"):
        with set_precision(situation):
            assert min(errors()) > 1e-5, "the test needs TF32"
            with precision.exact_products():
                assert errors()[0] < 1e-6
            with precision.full_precision():
                assert max(errors()) < 1e-5
            assert min(errors()) > 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_on_a_gpu_are_precise():
    run_in_new_process(check_products_on_gpu)


def test_overlapping_threads_keep_full_precision():
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    entered, left, inside = threading.Event(), threading.Event(), []

    def other():
        with precision.exact_products():
            entered.set()
            assert left.wait(30)
            inside.append(torch.backends.mkldnn.matmul.fp32_precision)

    thread = threading.Thread(target=other)
    try:
        with precision.exact_products():
            thread.start()
            assert entered.wait(30)
        left.set()
        thread.join(30)
        assert inside == ["ieee"]
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision(kept)
