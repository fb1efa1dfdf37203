"""What becomes of the moments when the basis changes: rotated, kept or reset."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

import cases
import egop
from cases import MLP, OptimizerCase
from egop.numerics import random_orthonormal
from egop.optimizer import moments
from explicit import basis_of, distance, identical, logistic

WEIGHT = cases.block("weight", weight=(3, 4))
STRUCTURES = [egop.Full(), egop.Shared(), egop.Kronecker(), egop.Auxiliary(rank=5), egop.Reduced(rank=5)]


def random_change(structure, seed, block=WEIGHT):
    """Return a change of basis of this structure with a random basis."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_orthonormal(*shape, generator) for name, shape in structure.basis_shapes(block).items()}
    return structure.change(block, tensors)


def states_of(change, *keys, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return [
        {key: torch.rand(shape, generator=generator, dtype=torch.float64) for key in keys} | {"step": torch.tensor(5.0)}
        for shape in change.coordinate_shapes()
    ]


def stacked(states, key):
    return torch.cat([state[key].flatten() for state in states])


def carried(states, old, new, **options):
    """Return the states after a change of basis, both the rotated entries and the untouched ones."""
    moved = [moments.select_movable(state, shape) for state, shape in zip(states, old.coordinate_shapes(), strict=True)]
    fresh = moments.rotate_states(moved, old, new, new.rotation_from(old), **options)
    return [state | own for state, own in zip(states, fresh, strict=True)]


@pytest.mark.parametrize("key", ["exp_avg", "momentum_buffer", "z", "ax"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_vectors_and_points_are_rotated_exactly(structure, key):
    old, new = (random_change(structure, seed) for seed in (0, 1))
    states = states_of(old, key)
    found = carried(states, old, new)
    expected = new.dense().mT @ (old.dense() @ stacked(states, key))
    torch.testing.assert_close(stacked(found, key), expected, rtol=0, atol=1e-12)
    assert all(state["step"] == 5 for state in found)


def squared_rotation(old, new):
    return (new.dense().mT @ old.dense()).square()


@pytest.mark.parametrize("key", ["exp_avg_sq", "sum", "exp_avg_var"])
@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Kronecker()], ids=str)
def test_squared_moments_are_carried_by_the_squared_rotation(structure, key):
    old, new = (random_change(structure, seed) for seed in (0, 1))
    states = states_of(old, key)
    found = carried(states, old, new)
    expected = squared_rotation(old, new) @ stacked(states, key)
    torch.testing.assert_close(stacked(found, key), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(stacked(found, key).sum(), stacked(states, key).sum())  # no variance is lost


@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Kronecker()], ids=str)
def test_magnitudes_are_carried_as_squared_moments_after_squaring(structure):
    old, new = (random_change(structure, seed) for seed in (0, 1))
    states = states_of(old, "exp_inf")
    expected = (squared_rotation(old, new) @ stacked(states, "exp_inf").square()).sqrt()
    found = stacked(carried(states, old, new), "exp_inf")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("structure", "key"),
    [(egop.Auxiliary(rank=5), "exp_avg_sq"), (egop.Reduced(rank=5), "exp_avg_sq"), (egop.Full(), "step_size")],
    ids=str,
)
def test_what_cannot_be_rotated_is_kept(structure, key):
    old, new = (random_change(structure, seed) for seed in (0, 1))
    states = states_of(old, key)
    assert torch.equal(stacked(carried(states, old, new), key), stacked(states, key))


def test_the_given_states_are_not_changed():
    old, new = (random_change(egop.Full(), seed) for seed in (0, 1))
    states = states_of(old, "exp_avg", "exp_avg_sq")
    before = [{key: value.clone() for key, value in state.items()} for state in states]
    carried(states, old, new)
    assert all(identical(one, other) for one, other in zip(states, before, strict=True))


def test_points_of_an_incomplete_basis_are_rotated_with_the_rest():
    old, new = (random_change(egop.Reduced(rank=5), seed) for seed in (0, 1))
    rest = torch.rand(3, 4, dtype=torch.float64)
    states = states_of(old, "z", "exp_avg")
    found = carried(states, old, new, rest=[rest])
    point = old.dense() @ stacked(states, "z") + rest.flatten()
    torch.testing.assert_close(stacked(found, "z"), new.dense().mT @ point, rtol=0, atol=1e-12)
    vector = old.dense() @ stacked(states, "exp_avg")
    torch.testing.assert_close(stacked(found, "exp_avg"), new.dense().mT @ vector, rtol=0, atol=1e-12)


@pytest.mark.parametrize("container", ["list", "dict", "deque", "tuple", "dict of lists"])
def test_vectors_in_containers_are_rotated_as_vectors(container):
    old, new = (random_change(egop.Full(), seed) for seed in (0, 1))
    ((one, other),) = ([states_of(old, "x", seed=seed)[0]["x"] for seed in (1, 2)],)
    pair = {
        "list": [one, other],
        "dict": {0.9: one, 0.99: other, "count": 3},
        "deque": deque([one, other], maxlen=2),
        "tuple": (one, other, None),
        "dict of lists": {"a": [one], "b": [other, torch.tensor(2.0)]},
    }[container]
    moved = moments.select_movable({"momentum_buffer": pair}, one.shape)
    assert [id(tensor) for tensor in moved.values()] == [id(one), id(other)]  # to be written where they are
    found = moments.rotate_states([moved], old, new, new.rotation_from(old))[0]
    for before, after in zip((one, other), found.values(), strict=True):
        torch.testing.assert_close(after, new.dense().mT @ old.dense() @ before, rtol=0, atol=1e-12)


def test_moments_in_lower_precision_are_rotated_in_that_of_the_basis():
    old, new = (random_change(egop.Full(), seed) for seed in (0, 1))
    (state,) = states_of(old, "exp_avg", "exp_avg_sq")
    low = {key: value.bfloat16() for key, value in state.items()}
    (found,) = carried([low], old, new)
    expected = new.dense().mT @ (old.dense() @ low["exp_avg"].double())
    torch.testing.assert_close(found["exp_avg"], expected, rtol=0, atol=1e-12)


SHAPE = torch.Size([3, 4])
UNKNOWN = {
    "of a coordinate": ({"secret": torch.zeros(SHAPE)}, "'secret'"),
    "factors": ({"row_var": torch.zeros(3, 1)}, "'row_var'"),
    "a list": ({"grads": [None, 0.5, torch.zeros(SHAPE)]}, r"'grads\[2\]'"),
    "a list of factors": ({"GG": [torch.zeros(3, 3), torch.zeros(4, 4)]}, r"'GG\[0\]'"),
    "a deque": ({"queue": deque([torch.zeros(SHAPE)])}, r"'queue\[0\]'"),
    "a dict of lists": ({"Q": {"left": [torch.zeros(3, 3)]}}, r"'Q\['left'\]\[0\]'"),
    "an object": ({"projector": object()}, "'projector'"),
    "a known name, another shape": (
        {"exp_avg": torch.zeros(3, 2)},
        r"'exp_avg' of shape \(3, 2\) \(float32\) for one of \(3, 4\)",
    ),
    "a known name, quantised": ({"exp_avg": torch.zeros(SHAPE, dtype=torch.uint8)}, r"'exp_avg' of .*\(uint8\)"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_state_that_is_not_known_is_an_error_never_a_guess(what):
    state, name = UNKNOWN[what]
    message = (
        f"The optimizer's state has {name}.*, and egop does not know how to rotate it. If it is linear "
        r"in the gradients.* register it: egop.optimizer.moments.LINEAR.add\(name\); if .*SQUARED.add\(name\). "
        "Or use moments='reset'"
    )
    with pytest.raises(ValueError, match=message):
        moments.select_movable(state, SHAPE)
    assert moments.select_movable(state, SHAPE, "reset") == {}


def test_single_numbers_stay_whatever_their_name():
    numbers = {"step": torch.tensor(3.0), "norm": torch.zeros(1), "k": 4, "name": "x", "none": None, "betas": (0.9, 1)}
    assert moments.select_movable(numbers, SHAPE) == {}


def test_of_what_is_kept_points_alone_are_rotated():
    state = {name: torch.zeros(SHAPE) for name in ("z", "exp_avg", "exp_avg_sq", "secret")}
    assert list(moments.select_movable(state, SHAPE, "keep")) == ["z"]


def test_a_state_of_some_coordinates_only_is_an_error():
    old, new = (random_change(egop.Auxiliary(rank=5), seed) for seed in (0, 1))
    one, other = states_of(old, "exp_avg")
    del other["exp_avg"]
    with pytest.raises(ValueError, match="'exp_avg' for some of a block's coordinates only"):
        carried([one, other], old, new)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"Invalid moments value: 'turn'\. Must be 'rotate', 'keep' or 'reset'"):
        moments.check_moments("turn")


# --- a quadratic whose basis is swapped half-way ---


class Quadratic(nn.Module):
    """½ (θ − 1)ᵀ H (θ − 1) with a dense H."""

    def __init__(self):
        super().__init__()
        Q = random_orthonormal(6, 6, torch.Generator().manual_seed(3))
        self.H = Q * torch.logspace(0, 1.5, 6).double() @ Q.mT
        self.theta = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def forward(self):
        return (self.theta - 1) @ self.H @ (self.theta - 1) / 2


VECTOR = cases.block("theta", theta=(6,))
BASES = [egop.Basis([random_change(egop.Full(), seed, VECTOR)]) for seed in (0, 1)]


def run(steps, policy=None, kind=torch.optim.Adam):
    """Take half of the steps in one basis, half in another (or in the same one, without a policy)."""
    model = Quadratic()
    optimizer = egop.ReparameterizedOptimizer(model, kind, BASES[0], lr=0.05)
    for step in range(steps):
        if policy is not None and step == steps // 2:
            optimizer.rebase(BASES[1], moments=policy)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return model, optimizer


def state(optimizer):
    ((coordinate,),) = ([*block.coordinates] for block in optimizer.blocks)
    return optimizer.inner.state[coordinate]


@pytest.mark.parametrize("policy", ["rotate", "keep", "reset"])
def test_what_each_policy_does_to_adam_on_a_quadratic(policy):
    model, optimizer = run(10)
    old, new = (basis["theta"].dense() for basis in BASES)
    before = {key: value.clone() for key, value in state(optimizer).items()}
    where = model.theta.detach().clone()
    optimizer.rebase(BASES[1], moments=policy)
    assert torch.equal(model.theta, where)  # the point stays in any case
    after = state(optimizer)
    if policy == "rotate":  # in original space the mean gradient is the same vector as before
        torch.testing.assert_close(new @ after["exp_avg"], old @ before["exp_avg"], rtol=0, atol=1e-12)
        T = new.mT @ old
        torch.testing.assert_close(after["exp_avg_sq"], T.square() @ before["exp_avg_sq"], rtol=0, atol=1e-12)
        assert after["step"] == 10
    elif policy == "keep":  # the same numbers, which now mean another vector
        assert identical(after, before)
        assert (new @ after["exp_avg"] - old @ before["exp_avg"]).norm() > 0.1 * before["exp_avg"].norm()
    else:
        assert after == {}


def test_moments_that_are_kept_point_elsewhere_and_cost_loss():
    """A reset may do better or worse than either, because it also forgets what was wrong."""
    assert run(60, "rotate")[0]().item() < run(60, "keep")[0]().item()


def test_momentum_descent_does_not_notice_a_change_of_basis():
    """Without squared moments the rotation is exact, so the trajectory is the same."""
    found = {}
    for policy in (None, "rotate", "keep"):
        model = Quadratic()
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.SGD, BASES[0], lr=0.01, momentum=0.9)
        for step in range(30):
            if policy and step % 7 == 3:
                optimizer.rebase(BASES[step % 2], moments=policy)
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        found[policy] = cases.parameters_of(model)
    assert distance(found[None], found["rotate"]) < 1e-12
    assert distance(found[None], found["keep"]) > 1e-3


# --- every optimizer ---

VARIANTS = [
    *cases.OPTIMIZERS,
    OptimizerCase("Adam-amsgrad", torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    OptimizerCase("RMSprop-centered", torch.optim.RMSprop, {"lr": 0.005, "centered": True, "momentum": 0.5}),
    OptimizerCase("ASGD", torch.optim.ASGD, {"lr": 0.05}),
    OptimizerCase("Rprop", torch.optim.Rprop, {"lr": 0.01}),
]


def steps(model, optimizer, count):
    for step in range(count):
        optimizer.zero_grad()
        logistic(model, MLP.batches()[step % 4]).backward()
        optimizer.step()


@pytest.mark.parametrize("policy", ["rotate", "reset"])
@pytest.mark.parametrize("optimizer", VARIANTS, ids=str)
def test_every_optimizer_can_be_rebased(optimizer, policy):
    first, second = (basis_of(MLP, structure=egop.Kronecker(), samples=count) for count in (40, 3))
    model = MLP.build()
    wrapped = egop.ReparameterizedOptimizer(model, optimizer.kind, first, **optimizer.arguments)
    steps(model, wrapped, 4)
    before = cases.parameters_of(model)
    wrapped.rebase(second, moments=policy)
    assert identical(cases.parameters_of(model), before)
    for block in wrapped.blocks:
        (decoded,) = block.change.decode([coordinate.detach() for coordinate in block.coordinates])
        torch.testing.assert_close(decoded, block.parameters[0].detach(), rtol=0, atol=1e-12)
    steps(model, wrapped, 4)
    assert all(torch.isfinite(value).all() for value in cases.parameters_of(model).values())
    assert distance(cases.parameters_of(model), before) > 1e-4
    if policy == "reset":  # from then on as a new optimizer on the blocks; the others go on
        fresh = MLP.build()
        fresh.load_state_dict(before)
        new = egop.ReparameterizedOptimizer(fresh, optimizer.kind, second, **optimizer.arguments)
        steps(fresh, new, 1)
        other = MLP.build()
        again = egop.ReparameterizedOptimizer(other, optimizer.kind, first, **optimizer.arguments)
        steps(other, again, 4)
        again.rebase(second, moments="reset")
        steps(other, again, 1)
        assert all(torch.allclose(other[i].weight, fresh[i].weight, rtol=0, atol=1e-10) for i in (0, 2))


def test_an_optimizer_of_unknown_state_is_refused_before_anything_changes():
    model = MLP.build()

    class Adafactor(torch.optim.Adafactor):
        works_on_matrices = True

    wrapped = egop.ReparameterizedOptimizer(model, Adafactor, basis_of(MLP, structure=egop.Shared()))
    steps(model, wrapped, 2)
    kept = [(block.change, [c.clone() for c in block.coordinates]) for block in wrapped.blocks]
    with pytest.raises(ValueError, match="state has 'row_var', and egop does not know how"):
        wrapped.rebase(basis_of(MLP, structure=egop.Shared(), samples=3))
    for block, (change, coordinates) in zip(wrapped.blocks, kept, strict=True):
        assert block.change is change
        assert all(torch.equal(one, other) for one, other in zip(block.coordinates, coordinates, strict=True))
    wrapped.rebase(basis_of(MLP, structure=egop.Shared(), samples=3), moments="reset")
    steps(model, wrapped, 2)


def test_momentum_in_containers_does_not_notice_a_change_of_basis():
    """AggMo keeps a dict of momenta: the same trajectory with and without changes of basis."""
    AggMo = pytest.importorskip("pytorch_optimizer").AggMo
    found = []
    for policy in (None, "rotate"):
        model = Quadratic()
        optimizer = egop.ReparameterizedOptimizer(model, AggMo, BASES[0], lr=0.005)
        for step in range(20):
            if policy and step % 7 == 3:
                optimizer.rebase(BASES[step % 2], moments=policy)
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        found.append(cases.parameters_of(model))
    assert distance(*found) < 1e-12


def test_queues_of_gradients_are_rotated_where_they_are():
    AdaShift = pytest.importorskip("pytorch_optimizer").AdaShift
    model = Quadratic()
    optimizer = egop.ReparameterizedOptimizer(model, AdaShift, BASES[0], lr=0.01, keep_num=3)
    for _ in range(4):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    queue = state(optimizer)["grad_queue"]
    before = [tensor.clone() for tensor in queue]
    optimizer.rebase(BASES[1])
    assert state(optimizer)["grad_queue"] is queue
    old, new = (basis["theta"].dense() for basis in BASES)
    for one, other in zip(before, queue, strict=True):
        torch.testing.assert_close(other, new.mT @ old @ one, rtol=0, atol=1e-12)


def test_another_kind_of_basis_needs_a_reset():
    model = MLP.build()
    wrapped = egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis_of(MLP))
    steps(model, wrapped, 2)
    with pytest.raises(ValueError, match=r"other blocks, or blocks of another kind.*rebase\(basis, moments='reset'\)"):
        wrapped.rebase(basis_of(MLP, structure=egop.Shared()))
    wrapped.rebase(basis_of(MLP, structure=egop.Shared()), moments="reset")
    assert {change.kind for change in wrapped.basis.values()} == {"Shared"}
    steps(model, wrapped, 2)
