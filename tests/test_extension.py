"""A structure, a rho, a refresh policy and a base optimizer of one's own: a file each, none of egop's is touched."""

import importlib
import sys
import textwrap

import pytest
import torch

import cases
import egop
from cases import MLP
from explicit import identical, logistic

FILES = {
    "reversing": '''
        """A structure: the inputs in reverse order, by their mean gradients' signs."""
        from dataclasses import dataclass
        import torch
        import egop
        from egop.basis.structures import Accumulator

        class ReversedChange(egop.ChangeOfBasis):
            kind = "Reversed"
            rowwise = True

            def encode(self, tensors):
                (tensor,) = tensors if not isinstance(tensors, torch.Tensor) else (tensors,)
                return (tensor @ self.tensors["order"],)

            def decode(self, coordinates):
                (matrix,) = coordinates if not isinstance(coordinates, torch.Tensor) else (coordinates,)
                return (matrix @ self.tensors["order"].mT,)

            def coordinate_shapes(self):
                return self.block.shapes

            @classmethod
            def basis_shapes(cls, block, settings):
                return {"order": (block.shapes[0][1], block.shapes[0][1])}

            def structure(self):
                return Reversed()

            @property
            def cost_per_step(self):
                return 0

        @dataclass(frozen=True)
        class Reversed(egop.Structure):
            change_type = ReversedChange
            joint = False

            def samples(self, block):
                return 1

            def accumulator(self, block):
                return _Signs(block)

        class _Signs(Accumulator):
            def __init__(self, block):
                self.block, self.total = block, torch.zeros(block.shapes[0], dtype=block.dtype)

            def add(self, gradients):
                self.total += gradients[0].sum(0)

            def merge(self, other):
                self.total += other.total

            def finish(self):
                signs = torch.where(self.total.sum(0) < 0, -1.0, 1.0).to(self.block.dtype)
                return None, ReversedChange(self.block, {"order": torch.diag(signs).flip(0)})
    ''',
    "corners": '''
        """A rho: the corners of a cube."""
        import torch
        import egop

        class Corners(egop.Distribution):
            def draw(self, objective, generator):
                def corner(like):
                    return torch.randint(0, 2, like.shape, generator=generator).to(like) - 0.5
                return {name: corner(value) for name, value in objective.parameters.items()}
    ''',
    "turning_back": '''
        """A refresh policy: every third step the basis with its columns in the opposite order."""
        from dataclasses import dataclass
        import egop
        from egop.refresh import Refresher

        @dataclass(frozen=True)
        class TurnBack(egop.Refresh):
            every: int = 3

            def begin(self, optimizer):
                return _TurningBack(self.every)

        class _TurningBack(Refresher):
            def __init__(self, every):
                super().__init__()
                self.every = every

            def before_step(self, optimizer):
                pass

            def after_step(self, optimizer):
                self.steps += 1
                if self.steps % self.every == 0:
                    self.renew(optimizer)

            def renew(self, optimizer):
                changes = [
                    block.change.replaced({key: tensor.flip(-1) for key, tensor in block.change.tensors.items()})
                    for block in optimizer.blocks
                ]
                optimizer.rebase(egop.Reparameterization(changes))
                self.renewals += 1
    ''',
    "signed": '''
        """A base optimizer: the sign of a momentum."""
        import torch

        class Signed(torch.optim.Optimizer):
            def __init__(self, params, lr=0.01, beta=0.9):
                super().__init__(params, {"lr": lr, "beta": beta})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is None:
                            continue
                        state = self.state[parameter]
                        if not state:
                            state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg"].lerp_(parameter.grad, 1 - group["beta"])
                        parameter.sub_(group["lr"] * state["exp_avg"].sign())
    ''',
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The four of them, imported from a folder."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield [importlib.import_module(name) for name in FILES]
    for name in FILES:
        del sys.modules[name]


def steps(model, optimizer, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        logistic(model, MLP.batches()[step % 4]).backward()
        optimizer.step()
    return cases.parameters_of(model)


def test_all_four_train_save_load_and_resume(own, tmp_path):
    reversing, corners, turning_back, signed = own

    def started():
        model = MLP.build()
        objective = egop.Objective(model, logistic, MLP.batches())
        basis = egop.estimate(
            objective, rho=corners.Corners(), structure=reversing.Reversed(), samples=3, progress=False
        )
        basis.save(tmp_path / "basis.safetensors")
        basis = egop.Reparameterization.load(tmp_path / "basis.safetensors")
        assert {change.kind for change in basis.values()} == {"Reversed"}
        return model, egop.ReparameterizedOptimizer(
            model, signed.Signed, basis, refresh=turning_back.TurnBack(), lr=0.01
        )

    model, optimizer = started()
    before = cases.parameters_of(model)
    steps(model, optimizer, 0, 4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half")
    egop.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    end = steps(model, optimizer, 4, 9)
    assert optimizer.refresher.renewals == 3
    assert not identical(end, before)

    state = torch.load(tmp_path / "half", weights_only=True)
    other, loaded = started()
    other.load_state_dict(state["model"])
    loaded.load_state_dict(state["optimizer"])
    assert identical(steps(other, loaded, 4, 9), end)
    another, loaded = started()
    egop.checkpoint.load(tmp_path / "checkpoint", another, loaded)
    assert identical(steps(another, loaded, 4, 9), end)


def test_a_kind_that_is_taken_is_refused():
    with pytest.raises(
        TypeError, match=r"has the kind 'Full', which is that of egop\.basis\.structures\.full\.FullChange"
    ):
        type("Another", (egop.ChangeOfBasis,), {"kind": "Full"})
