import pytest
import torch

from egop_lab.models.small import accuracy, cross_entropy, digits_network, xavier_


def test_the_digits_network_has_the_papers_size():
    assert sum(parameter.numel() for parameter in digits_network().parameters()) == 2410


@pytest.mark.parametrize("index", [0, 2])
def test_xavier_draws_the_stated_distributions(index):
    generator = torch.Generator().manual_seed(0)
    weights, biases = [], []
    for _ in range(300):
        layer = xavier_(digits_network(), generator)[index]
        weights.append(layer.weight.detach().flatten())
        biases.append(layer.bias.detach())
    fans = layer.in_features + layer.out_features
    weight, bias = torch.cat(weights), torch.cat(biases)
    assert weight.var().item() == pytest.approx(2 / fans, rel=0.03)
    assert bias.abs().max().item() == pytest.approx(fans**-0.5, rel=0.01)
    assert bias.abs().max() <= fans**-0.5
    assert bias.var().item() == pytest.approx(1 / fans / 3, rel=0.06)


def test_xavier_draws_from_the_given_generator_alone():
    before = torch.get_rng_state()
    first = xavier_(digits_network_without_draws(before), torch.Generator().manual_seed(3))
    second = xavier_(digits_network_without_draws(before), torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def digits_network_without_draws(state):
    model = digits_network()
    torch.set_rng_state(state)
    return model


def test_xavier_without_a_generator_follows_the_global_seed():
    models = []
    for _ in range(2):
        model = digits_network()
        torch.manual_seed(5)
        models.append(xavier_(model))
    assert all(torch.equal(a, b) for a, b in zip(*[model.parameters() for model in models], strict=True))


def test_losses_and_accuracies_of_certain_answers():
    model = torch.nn.Identity()
    outputs = 100 * torch.eye(4)
    assert accuracy(model, (outputs, torch.tensor([0, 1, 2, 0]))).item() == 0.75
    assert cross_entropy(model, (outputs, torch.arange(4))).item() == pytest.approx(0)
