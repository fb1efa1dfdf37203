"""A structure, a rho, a refresh policy and a base optimizer of one's own: a file each, none of egop's is touched."""

import copy
import importlib
import sys
import textwrap

import pytest
import torch

import cases
import egop
from cases import MLP
from egop.basis import Block
from explicit import basis_of, identical, logistic

FILES = {
    "reversing": '''
        """A structure: the inputs in reverse order, by their mean gradients' signs."""
        from dataclasses import dataclass
        import torch
        import egop
        from egop.basis.structures import Accumulator

        class ReversedChange(egop.ChangeOfBasis):
            kind = "Reversed"
            is_rowwise = True

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
    "opposite": '''
        """A refresh policy: every third step the basis with its columns in the opposite order."""
        from dataclasses import dataclass
        import egop
        from egop.refresh import Refresher

        @dataclass(frozen=True)
        class Opposite(egop.Refresh):
            every: int = 3

            def start(self, optimizer):
                return _OppositeRefresher(self.every)

        class _OppositeRefresher(Refresher):
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
                    block.change.with_tensors({key: tensor.flip(-1) for key, tensor in block.change.tensors.items()})
                    for block in optimizer.blocks
                ]
                optimizer.rebase(egop.Basis(changes))
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
    """Import the four files from a temporary folder."""
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


def test_own_extensions_train_save_load_and_resume(own, tmp_path):
    reversing, corners, opposite, signed = own

    def started():
        model = MLP.build()
        objective = egop.Objective(model, logistic, MLP.batches())
        basis = egop.estimate(
            objective, rho=corners.Corners(), structure=reversing.Reversed(), samples=3, progress=False
        )
        basis.save(tmp_path / "basis.safetensors")
        basis = egop.Basis.load(tmp_path / "basis.safetensors")
        assert {change.kind for change in basis.values()} == {"Reversed"}
        return model, egop.ReparameterizedOptimizer(model, signed.Signed, basis, refresh=opposite.Opposite(), lr=0.01)

    model, optimizer = started()
    before = cases.parameters_of(model)
    steps(model, optimizer, 0, 4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half")
    end = steps(model, optimizer, 4, 9)
    assert optimizer.refresher.renewals == 3
    assert not identical(end, before)

    state = torch.load(tmp_path / "half", weights_only=True)
    other, loaded = started()
    other.load_state_dict(state["model"])
    loaded.load_state_dict(state["optimizer"])
    assert identical(steps(other, loaded, 4, 9), end)


def test_a_structure_kind_that_exists_is_refused():
    with pytest.raises(TypeError, match=r"has the same kind, 'Full', as egop\.basis\.structures\.full\.FullChange"):
        type("Another", (egop.ChangeOfBasis,), {"kind": "Full"})


DOUBLING = '''
    """A refresh policy with its own state: a decomposition after 1, 2, 4, 8 ... steps."""
    from dataclasses import dataclass
    import torch
    import egop
    from egop.refresh import Refresher

    @dataclass(frozen=True)
    class Doubling(egop.Refresh):
        decay: float = 0.9

        def start(self, optimizer):
            return _DoublingRefresher(self.decay)

    class _DoublingRefresher(Refresher):
        def __init__(self, decay):
            super().__init__()
            self.decay, self.grams = decay, {}

        def before_step(self, optimizer):
            pass

        def observe(self, optimizer):
            for stack in optimizer.stacks:
                for place, index in enumerate(stack.active):
                    name, gradient = stack.blocks[index].name, stack.gradients[0][place]
                    gram = gradient.mT @ gradient
                    self.grams[name] = torch.lerp(gram, self.grams.get(name, gram), self.decay)

        def after_step(self, optimizer):
            self.steps += 1
            if self.steps & (self.steps - 1) == 0:
                self.renew(optimizer)

        def renew(self, optimizer):
            bases = {name: torch.linalg.eigh(gram).eigenvectors.flip(-1) for name, gram in self.grams.items()}
            changes = [block.change.with_tensors({"basis": bases[block.name]}) for block in optimizer.blocks]
            optimizer.rebase(egop.Basis(changes))
            self.renewals += 1

        def block_states(self, optimizer, *, complete):
            return {name: {"gram": gram} for name, gram in self.grams.items()}

        def load(self, counts, states, blocks):
            super().load(counts, states, blocks)
            self.grams = {name: state["gram"].clone() for name, state in states.items() if "gram" in state}
'''


def test_a_refresh_policy_may_observe_gradients_and_save_its_own_state(tmp_path, monkeypatch):
    (tmp_path / "doubling.py").write_text(textwrap.dedent(DOUBLING))
    monkeypatch.syspath_prepend(tmp_path)
    doubling = importlib.import_module("doubling")

    def start():
        model = MLP.build()
        basis = basis_of(MLP, structure=egop.Shared())
        return model, egop.ReparameterizedOptimizer(
            model, torch.optim.Adam, basis, refresh=doubling.Doubling(), lr=0.01
        )

    model, optimizer = start()
    steps(model, optimizer, 0, 5)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    assert repr(optimizer.refresher) == "Doubling(): 5 steps, 3 renewals, 0 failures"
    end = steps(model, optimizer, 5, 9)
    other, resumed = start()
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert identical(steps(other, resumed, 5, 9), end)
    assert resumed.refresher.renewals == 4
    del sys.modules["doubling"]


class PairsChange(egop.ChangeOfBasis):
    """Inputs rotated in pairs: its one tensor is a stack of small matrices, which is no stack of weights."""

    kind = "Pairs"
    is_rowwise = True

    def encode(self, tensors):
        (tensor,) = tensors if not isinstance(tensors, torch.Tensor) else (tensors,)
        return ((tensor.unflatten(-1, (-1, 1, 2)) @ self.tensors["basis"].unsqueeze(-4)).flatten(-3),)

    def decode(self, coordinates):
        (matrix,) = coordinates if not isinstance(coordinates, torch.Tensor) else (coordinates,)
        return ((matrix.unflatten(-1, (-1, 1, 2)) @ self.tensors["basis"].mT.unsqueeze(-4)).flatten(-3),)

    def coordinate_shapes(self):
        return self.block.shapes

    @classmethod
    def basis_shapes(cls, block, settings):
        return {"basis": (block.shapes[0][1] // 2, 2, 2)}

    def structure(self):
        return None

    @property
    def cost_per_step(self):
        return 0

    def rotate(self, coordinates, rotation):
        matrix = coordinates[0].unflatten(-1, (-1, 1, 2)) @ rotation["basis"].mT.unsqueeze(-4)
        return (matrix.flatten(-3),)


@pytest.mark.parametrize("rows", [2, 5])
def test_a_basis_of_many_small_matrices_is_no_stack_of_weights(rows):
    """With as many rows as matrices, they were mistaken for one weight per matrix, and a change to one moved others."""
    layer = torch.nn.Linear(4, rows, bias=False).double()
    block = Block.from_tensors("weight", {"weight": layer.weight})
    start = PairsChange(block, {"basis": torch.eye(2, dtype=torch.float64).repeat(2, 1, 1)})
    optimizer = egop.ReparameterizedOptimizer(layer, torch.optim.Adam, egop.Basis([start]), lr=0.0)
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer.step()
    before = layer.weight.detach().clone()
    rotated = torch.tensor([[[1, 0], [0, 1]], [[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)
    optimizer.rebase(egop.Basis([start.with_tensors({"basis": rotated})]))
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before, rtol=1e-12, atol=1e-12)
