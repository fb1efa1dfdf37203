"""How many digits products have inside, and that nothing of it is left outside.

What changes settings of torch runs in a process of its own, since some of them have no way back.
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

# The public attributes do not reach all of them.
read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter

# The last one chooses for convolutions, which cannot be undone.
SITUATIONS = {
    "nothing chosen": {},
    "inherited from all": {"generic all": "tf32"},
    "inherited from the backend": {"cuda all": "tf32", "mkldnn all": "bf16"},
    "matrices chosen": {"cuda matmul": "tf32", "mkldnn matmul": "bf16"},
    "matrices chosen as all": {"generic all": "tf32", "cuda matmul": "tf32", "mkldnn matmul": "tf32"},
    "matrices chosen as the backend": {"cuda all": "tf32", "cuda matmul": "tf32", "mkldnn all": "tf32"},
    "matrices precise by choice": {"generic all": "tf32", "cuda matmul": "ieee", "mkldnn matmul": "ieee"},
    "everything chosen": {f"{backend} {kind}": "tf32" for backend, kind in SETTINGS},
}


@contextlib.contextmanager
def chosen(situation):
    names = {tuple(name.split()): value for name, value in SITUATIONS[situation].items()}
    for name, value in names.items():
        write(*name, value)
    yield
    for name in names:
        write(*name, "none")


def seen():
    """What every setting shows, now and while that of all, or of a backend, is another one: so what follows what."""
    shown = [{setting: read(*setting) for setting in SETTINGS}]
    for value in ("ieee", "tf32"):
        with torch.backends.flags(fp32_precision=value):
            shown.append({setting: read(*setting) for setting in SETTINGS})
    return shown


def scopes_are_precise_and_leave_no_trace():
    for situation in SITUATIONS:
        with chosen(situation):
            before = seen()
            for scope, kinds in (
                (precision.exact_products, ["matmul"]),
                (precision.full_precision, ["matmul", "conv", "rnn"]),
            ):
                with contextlib.suppress(ZeroDivisionError), scope():
                    inside = {read(backend, kind) for backend in BACKENDS for kind in kinds}
                    assert inside <= {"ieee", "none"}, (situation, inside)
                    raise ZeroDivisionError
                assert seen() == before, situation


def train():
    """Every way in which an estimate, a step and a rebase ask for full precision."""
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


def training_leaves_no_trace():
    for situation in ("nothing chosen", "inherited from all", "inherited from the backend", "matrices chosen as all"):
        with chosen(situation):
            before = seen()
            train()
            assert seen() == before, situation
    torch.backends.fp32_precision = "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "tf32"


def training_with_frozen_flags():
    torch.backends.fp32_precision = "tf32"
    torch.backends.disable_global_flags()
    train()


def call(rank, world, function):
    function()


def in_a_process_of_its_own(function):
    run(call, 1, function)


def test_products_are_precise_inside_and_what_follows_what_is_as_before():
    in_a_process_of_its_own(scopes_are_precise_and_leave_no_trace)


def test_training_and_estimating_leave_inherited_settings_inherited():
    in_a_process_of_its_own(training_leaves_no_trace)


def test_frozen_flags_stop_neither_a_step_nor_vmapped_sampling():
    in_a_process_of_its_own(training_with_frozen_flags)


def tf32_is_off_where_it_is_inherited():
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

    for situation in ("inherited from all", "inherited from the backend", "matrices chosen"):
        with chosen(situation):
            assert min(errors()) > 1e-5, "otherwise this tests nothing"
            with precision.exact_products():
                assert errors()[0] < 1e-6
            with precision.full_precision():
                assert max(errors()) < 1e-5
            assert min(errors()) > 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_on_a_gpu_have_all_digits_inside():
    in_a_process_of_its_own(tf32_is_off_where_it_is_inherited)


def test_a_thread_that_leaves_takes_no_digits_from_another():
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


def test_settings_are_restored_after_an_error():
    kinds = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    kept = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        before = [kind.fp32_precision for kind in kinds]
        with contextlib.suppress(ZeroDivisionError), precision.exact_products():
            assert [kind.fp32_precision for kind in kinds] == ["ieee", "ieee"]
            raise ZeroDivisionError
        assert [kind.fp32_precision for kind in kinds] == before
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(kept)
