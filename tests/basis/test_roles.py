"""Roles of parameters: read from the module, or guessed from name and shape."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import cases
import egop
from egop.basis.roles import Role, find_roles, has_norm_layers

VECTOR = "a vector: it has one row or column"
MATRIX, STACK = Role("weight"), Role("weight", stacked=1)


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2, by that name: (inputs, outputs)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))


class Experts(nn.Module):
    """Stacked experts as transformers has them, with outputs first or inputs first."""

    def __init__(self, transposed):
        super().__init__()
        up, down = (4, 10, 6), (4, 6, 5)
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 6, 10) if transposed else torch.zeros(up))
        self.down_proj = nn.Parameter(torch.zeros(4, 5, 6) if transposed else torch.zeros(down))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 10))


def raw(**shapes):
    """Return a module that holds only parameters."""
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


PARTS = {
    "Linear": (nn.Linear(3, 4), {"weight": MATRIX, "bias": Role("bias")}),
    "a linear layer of one output": (nn.Linear(3, 1), {"weight": MATRIX, "bias": Role("bias")}),
    "Embedding": (nn.Embedding(5, 3), {"weight": Role("embedding")}),
    "EmbeddingBag": (nn.EmbeddingBag(5, 3), {"weight": Role("embedding")}),
    "Conv2d": (nn.Conv2d(2, 3, 2, bias=False), {"weight": Role("weight", overlaps=True)}),
    "patches": (nn.Conv2d(2, 3, 2, stride=2, bias=False), {"weight": MATRIX}),
    "a convolution of single pixels": (nn.Conv2d(2, 3, 1, bias=False), {"weight": MATRIX}),
    "ConvTranspose1d": (
        nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False),
        {"weight": Role("weight", 2, overlaps=True)},
    ),
    "Conv1D": (Conv1D(6, 4), {"weight": Role("weight", 1)}),
    "Bilinear": (nn.Bilinear(2, 3, 4, bias=False), {"weight": STACK}),
    "RMSNorm": (nn.RMSNorm([2, 3]), {"weight": Role("norm")}),
    "experts, outputs first": (
        Experts(transposed=False),
        {"gate_up_proj": STACK, "down_proj": STACK, "gate_up_proj_bias": Role("bias")},
    ),
    "experts, inputs first": (
        Experts(transposed=True),
        {"gate_up_proj": Role("weight", 1, 1), "down_proj": Role("weight", 1, 1), "gate_up_proj_bias": Role("bias")},
    ),
    "other stacks": (raw(w1=(4, 10, 6), many=(2, 3, 4, 5)), {"w1": STACK, "many": Role("weight", stacked=2)}),
    "a class token and a position table": (
        raw(cls_token=(1, 1, 6), pos_embed=(1, 5, 6)),
        {"cls_token": Role("other", stacked=1, why=VECTOR), "pos_embed": STACK},
    ),
    "Mamba's": (
        raw(A_log=(6, 3), D=(6,)),
        {"A_log": Role("other", why="logarithms, which are used entry by entry"), "D": Role("bias")},
    ),
    "MultiheadAttention": (
        nn.MultiheadAttention(4, 2, bias=False, add_bias_kv=True),
        {"in_proj_weight": MATRIX, "bias_k": Role("bias"), "bias_v": Role("bias"), "out_proj.weight": MATRIX},
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_role_comes_from_the_module(part):
    module, expected = PARTS[part]
    model = nn.Sequential(module, nn.Linear(2, 2), nn.Linear(2, 2))  # the last one is the head
    found = find_roles(dict(model.named_parameters()), model)
    assert {name.removeprefix("0."): layer for name, layer in found.items() if name.startswith("0.")} == expected


def head_of(model):
    return [name for name, layer in find_roles(dict(model.named_parameters()), model).items() if layer.kind == "head"]


def body(**heads):
    """Build a model of two layers, with other modules before and after them."""
    model = nn.Module()
    before, after = heads.pop("before", {}), heads.pop("after", {})
    for name, part in {**before, "first": nn.Linear(4, 4), "second": nn.Linear(4, 4), **after}.items():
        model.add_module(name, part)
    return model


class Saying(nn.Module):
    """A model that declares its output layer."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 7)
        self.layer = nn.Linear(4, 4)

    def get_output_embeddings(self):
        return self.out


def test_the_head_is_what_the_model_says_or_a_name_or_the_last_linear_layer():
    assert head_of(body()) == ["second.weight"]
    assert head_of(body(before={"lm_head": nn.Linear(4, 7)})) == ["lm_head.weight"]
    assert head_of(body(before={"score": nn.Linear(4, 7)}, after={"classifier": Conv1D(4, 2)})) == [
        "score.weight",
        "classifier.weight",
    ]
    assert head_of(Saying()) == ["out.weight"]
    assert head_of(nn.Sequential(Saying(), nn.Linear(4, 4))) == ["0.out.weight"]  # also inside a wrapper
    assert head_of(nn.Linear(3, 2)) == []
    assert head_of(body(after={"conv": nn.Conv1d(4, 4, 1)})) == []


def test_frozen_teacher_does_not_provide_the_head():
    model = nn.ModuleDict({"student": cases.mlp(), "teacher": cases.mlp().requires_grad_(False)})
    assert head_of(model["student"]) == ["2.weight"]
    assert head_of(model) == ["student.2.weight", "teacher.2.weight"]  # each network has its own


def test_head_is_recognized_even_if_it_is_given_or_trained_alone():
    model = cases.mlp()
    model[0].requires_grad_(False)
    assert find_roles({"2.weight": model[2].weight}, model)["2.weight"].kind == "head"


def test_the_order_in_which_parameters_are_given_does_not_matter():
    model = cases.mlp()
    backwards = dict(reversed(list(model.named_parameters())))
    assert find_roles(backwards, model) == find_roles(dict(model.named_parameters()), model)


# --- parametrised weights are looked at without touching ---

PARAMETRISED = {
    "spectral_norm": (nn.utils.parametrizations.spectral_norm, "parametrizations.weight.original", None),
    "weight_norm": (
        nn.utils.parametrizations.weight_norm,
        "parametrizations.weight.original1",
        "parametrizations.weight.original0",
    ),
    "old spectral_norm": (nn.utils.spectral_norm, "weight_orig", None),
    "old weight_norm": (nn.utils.weight_norm, "weight_v", "weight_g"),
}
parametrised = pytest.mark.parametrize("kind", PARAMETRISED)


def parametrised_model(kind):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old ones are deprecated
        wrap = PARAMETRISED[kind][0]
        return nn.Sequential(wrap(nn.Linear(6, 5)), nn.Tanh(), wrap(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))


@parametrised
def test_estimation_does_not_change_a_parametrized_weight(kind):
    model = parametrised_model(kind).double()
    before = cases.state_of(model)
    batches = cases.MLP.batches()
    for given in (model, model.named_parameters()):
        egop.ReparameterizedOptimizer(given, torch.optim.AdamW, refresh=egop.Online(structure=egop.Shared()), lr=0.1)
        assert cases.state_of(model) == before
    objective = egop.Objective(model, cases.cross_entropy, batches)
    for rho in (egop.Recentered(), egop.Gaussian()):
        cases.estimate(objective, rho=rho, structure="auto", samples=4)
        assert cases.state_of(model) == before
        repr(vars(model[0]).get("weight"))  # the old ones' own, which a finished vmap must not have left behind


@parametrised
def test_parametrized_weight_counts_as_the_layers_weight(kind):
    model = parametrised_model(kind)
    _, weight, magnitude = PARAMETRISED[kind]
    found = find_roles(dict(model.named_parameters()), model)
    assert found[f"0.{weight}"] == MATRIX
    assert head_of(model) == ["4.weight"]
    if magnitude:
        assert found[f"0.{magnitude}"] == Role("other", why=VECTOR)


def test_parametrized_transposed_convolution_is_recognized():
    model = nn.utils.parametrizations.spectral_norm(nn.ConvTranspose1d(4, 6, 3, groups=2))
    assert find_roles(dict(model.named_parameters()), model)["parametrizations.weight.original"] == Role(
        "weight", 2, overlaps=True
    )


# --- without a module ---

GUESSES = {
    "transformer.wte.weight": ((9, 4), Role("embedding", is_guess=True)),
    "model.embed_tokens.weight": ((9, 4), Role("embedding", is_guess=True)),
    "lm_head.weight": ((9, 4), Role("head", is_guess=True)),
    "h.0.attn.weight": ((4, 4), Role("weight", is_guess=True)),
    "h.0.attn.bias": ((4,), Role("bias")),
    "experts.bias": ((4, 5), Role("bias")),
    "patch_embed.proj.weight": ((8, 3, 4, 4), Role("weight", is_guess=True)),
    "conv.weight": ((3, 8, 5), Role("weight", is_guess=True, overlaps=True)),
    "features.0.weight": ((8, 4, 3), Role("weight", is_guess=True, overlaps=True)),
    "mlp.experts.down_proj": ((8, 4, 3), Role("weight", stacked=1, is_guess=True)),
    "moe.w1": ((2, 8, 6), Role("weight", stacked=1, is_guess=True)),
    "cls_token": ((1, 1, 8), Role("other", stacked=1, why=VECTOR, is_guess=True)),
}


@pytest.mark.parametrize("name", GUESSES)
def test_without_a_module_names_and_shapes_are_all_there_is(name):
    shape, expected = GUESSES[name]
    assert find_roles({name: torch.zeros(shape)}, None) == {name: expected}


def made(refresh, given=lambda model: model.named_parameters(), basis=None, **options):
    """Return the warnings of building and running an optimizer, and their files; ``told=True`` passes the model."""
    model = cases.MLP.build()
    params, options = given(model), {"model": model} if options.get("told") else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = egop.ReparameterizedOptimizer(params, torch.optim.AdamW, basis, refresh=refresh, lr=0.1, **options)
        cases.train(model, optimizer, cases.MLP.batches(), 2)
    return [str(each.message) for each in caught], [each.filename for each in caught]


@pytest.mark.parametrize("refresh", [egop.Online(), egop.Online(tolerance=0.1)], ids=["in turn", "drifted"])
def test_what_was_guessed_is_said_once(refresh):
    (message,), (place,) = made(refresh)
    assert message.startswith("egop.Online chooses weights by their roles")
    assert "Weights to rotate: 0.weight, 2.weight. Skipped weights: none." in message
    assert "model=model" in message
    assert place == __file__


def test_no_warning_if_nothing_was_guessed():
    basis = cases.estimate(cases.MLP.objective())
    assert made(egop.Online(), lambda model: model) == ([], [])
    assert made(egop.Online(), lambda model: model.parameters(), told=True) == ([], [])
    assert made(egop.Online(structure=egop.Shared())) == ([], [])
    assert made(None, basis=basis) == ([], [])
    assert made(egop.Online(), basis=basis) == ([], [])


# --- what follows from it ---


class Mixture(nn.Module):
    """Experts and a class token before a head; all experts see all inputs."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 6))
        self.experts = nn.Parameter(torch.randn(3, 5, 6) / 4)
        self.down = nn.Parameter(torch.randn(3, 4, 5) / 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        hidden = torch.tanh(torch.einsum("eoi,bi->ebo", self.experts, x + self.token[0]))
        return self.head(torch.einsum("eoi,ebi->bo", self.down, hidden))


def test_why_weights_have_no_basis_is_known_to_the_refresh():
    case = cases.ModelCase("mixture", Mixture, (6,), 3)
    model = case.build()
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(), lr=0.01)
    cases.train(model, optimizer, case.batches(), 2)
    assert list(optimizer.basis) == ["experts", "down"]
    assert optimizer.refresher.unrotated == {"token": VECTOR, "head.weight": "the output head"}


# --- real models ---

SMALL = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt2(transformers, width=16, layers=1):
    config = transformers.GPT2Config(vocab_size=61, n_positions=24, n_embd=width, n_layer=layers, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama(transformers):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))


def mixtral(transformers):
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


def bert(transformers):
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, max_position_embeddings=16))


def vit(transformers):
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=8, patch_size=4))


def mamba(transformers):
    config = transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4)
    return transformers.MambaForCausalLM(config)


# For each the weights that are not to be rotated, and of the others those that are no plain matrix.
REAL = {
    gpt2: ({"transformer.wte.weight", "transformer.wpe.weight"}, {Role("weight", 1): 4}),
    llama: ({"model.embed_tokens.weight", "lm_head.weight"}, {}),
    mixtral: ({"model.embed_tokens.weight", "lm_head.weight"}, {STACK: 2}),
    bert: (
        {
            "bert.embeddings.word_embeddings.weight",
            "bert.embeddings.position_embeddings.weight",
            "bert.embeddings.token_type_embeddings.weight",
            "classifier.weight",
        },
        {},
    ),
    vit: ({"vit.embeddings.cls_token", "classifier.weight"}, {STACK: 1}),
    mamba: ({"backbone.embeddings.weight", "backbone.layers.0.mixer.A_log"}, {Role("weight", overlaps=True): 1}),
}


@pytest.mark.parametrize("build", REAL, ids=lambda build: build.__name__)
def test_the_models_of_transformers_are_known(build):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = build(transformers)
    layers = find_roles(dict(model.named_parameters()), model)
    left, special = REAL[build]
    assert {name for name, layer in layers.items() if layer.skip_reason} == left
    found = [layer for layer in layers.values() if layer.kind == "weight" and layer != MATRIX]
    assert {layer: found.count(layer) for layer in found} == special


@pytest.mark.slow
def test_language_model_in_framework_groups_trains_as_well_as_with_adamw():
    transformers = pytest.importorskip("transformers")
    losses = {}
    for name in ("AdamW", "egop"):
        torch.manual_seed(0)
        model = gpt2(transformers, width=32, layers=2).eval()  # without dropout
        groups = [
            {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
        ]
        if name == "AdamW":
            optimizer = torch.optim.AdamW(groups, lr=1e-3)
        else:
            options = {"model": model, "refresh": egop.Online(), "lr": 1e-3}
            optimizer = egop.ReparameterizedOptimizer(groups, torch.optim.AdamW, **options)
        losses[name] = trained(model, optimizer)
    assert {key.split(".")[1] for key in optimizer.basis} == {"h"}  # neither wte, which is the head too, nor wpe
    assert losses["egop"] <= losses["AdamW"]  # 3.4 with the embeddings rotated


def trained(model, optimizer, steps=150):
    """Return the mean loss of the last ten steps, on sequences in which each token has four successors."""
    successors = torch.randint(61, (61, 4), generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        tokens = torch.randint(61, (16, 24), generator=generator)
        for place, choice in enumerate(torch.randint(4, (23, 16), generator=generator)):
            tokens[:, place + 1] = successors[tokens[:, place], choice]
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return sum(found[-10:]) / 10


class MyLinear(nn.Module):
    """A linear layer of the user's own."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))


def test_layers_of_the_users_own_are_embeddings_and_heads_if_they_are_named_so():
    model = nn.ModuleDict({
        "embed_tokens": MyLinear(6, 20), "wpe": MyLinear(6, 9), "layer": MyLinear(6, 6), "lm_head": MyLinear(6, 20),
    })  # fmt: skip
    named = dict(model.named_parameters())
    with_model = {name: role.kind for name, role in find_roles(named, model).items()}
    assert list(with_model.values()) == ["embedding", "embedding", "weight", "head"]
    assert with_model == {name: role.kind for name, role in find_roles(named, None).items()}


class NormedLinear(nn.Linear):
    """A linear layer, whatever its name says."""


class NormalPolicy(nn.Sequential):
    """A model with the name of a distribution."""


@pytest.mark.parametrize("wrap", [
    NormalPolicy,
    nn.utils.parametrizations.spectral_norm,
    nn.utils.parametrizations.weight_norm,
])  # fmt: skip
def test_only_layers_that_normalize_activations_count_as_norm_layers(wrap):
    model = nn.Sequential(NormedLinear(4, 4), wrap(nn.Linear(4, 4)), nn.Linear(4, 2))
    assert not has_norm_layers(model)
    assert has_norm_layers(nn.Sequential(model, nn.RMSNorm(2)))
    assert find_roles(dict(model.named_parameters()), model)["0.weight"].kind == "weight"
