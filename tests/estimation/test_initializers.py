"""The default rho: a model's own initializers, and the log lines if they do not fit the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import egop

TOKENS = 11


def drawn(model, count=40, **options):
    """Return initializations drawn one by one and together, by name."""
    objective = egop.Objective(model, lambda model, batch: 0, [])
    before = cases.state_of(model)
    rho = egop.Initialization(**options)
    rho.check(objective)
    points = [
        rho.draw_many(objective, torch.Generator().manual_seed(seed), many) for seed, many in ((1, 1), (2, count))
    ]
    assert cases.state_of(model) == before
    return {name: torch.cat([point[name] for point in points]) for name in points[0]}


def logged(caplog):
    """Return the log lines, except those about the few samples of these tests."""
    lines = [record.getMessage() for record in caplog.records if record.name == "egop"]
    return [line for line in lines if "too few for the basis" not in line]


def assert_drawn_as_built(build, count=40, **options):
    """Check constants exactly, and elsewhere the mean and the standard deviation; draws must differ."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        built = [build() for _ in range(count)]
    points = drawn(built[0], count, **options)
    assert points
    for name, found in points.items():
        expected = torch.stack([model.get_parameter(name).detach() for model in built]).double()
        spread, size = expected.std().item(), expected.numel() ** 0.5
        if spread == 0:
            assert torch.equal(found.double(), expected[:1].expand_as(found)), name
            continue
        assert found.double().std().item() == pytest.approx(spread, rel=20 / size), name
        assert found.double().mean().item() == pytest.approx(expected.mean().item(), abs=8 * spread / size), name
        assert not torch.equal(found[0], found[1]), name


# --- transformers ---


def bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.BertConfig(vocab_size=TOKENS, max_position_embeddings=6, num_labels=3, **sizes)
    return transformers.BertForSequenceClassification(config)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=TOKENS, n_positions=6, n_embd=8, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


class Wrapped(nn.Module):
    """A transformers model inside the user's own module."""

    def __init__(self):
        super().__init__()
        self.encoder = bert().bert
        self.head = nn.Linear(8, 3)


@pytest.mark.parametrize("build", [bert, gpt2, Wrapped])
def test_transformers_models_are_drawn_as_built(build, caplog):
    assert_drawn_as_built(build)
    assert logged(caplog) == []


def test_weights_loaded_by_transformers_are_drawn(tmp_path, caplog):
    bert().save_pretrained(tmp_path)
    kind = type(bert())
    model = kind.from_pretrained(tmp_path)
    marks = [getattr(each, "_is_hf_initialized", None) for each in model.parameters()]
    assert True in marks, "otherwise this tests nothing"
    found = drawn(model)
    assert all(value.std(0).max() > 0 for name, value in found.items() if value.dim() == 3)
    assert marks == [getattr(each, "_is_hf_initialized", None) for each in model.parameters()]
    assert logged(caplog) == []


def words(model, batch):
    return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def test_estimate_for_a_transformers_model(caplog):
    model = bert().eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(TOKENS, (4, 8, 5), generator=generator)
    batches = [{"input_ids": each, "labels": torch.arange(8) % 3} for each in ids]
    rho = egop.Initialization()
    basis = egop.estimate(egop.Objective(model, words, batches), samples=6, rho=rho, progress=False, sampling="loop")
    assert "bert.encoder.layer.0.attention.self.query.weight" in basis
    assert logged(caplog) == []


# --- other authors ---


class PerModule(nn.Module):
    """Like nanoGPT: a function that is applied to every module."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


class Whole(nn.Module):
    """Like timm and MAE: a function for the whole model that applies another one to each module."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.head = nn.Linear(8, 40)
        self.init_weights()

    def init_weights(self, mode=""):
        nn.init.normal_(self.token, std=1e-3)
        self.apply(self._init_weights)
        with torch.no_grad():
            self.head.weight.mul_(0.1)

    @staticmethod
    def _init_weights(m):
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            nn.init.zeros_(m.bias)


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.other, self.head = Whole(), PerModule(), nn.Linear(8, 5)


@pytest.mark.parametrize("build", [PerModule, Whole, Inside, lambda: nn.Sequential(Inside(), nn.Linear(5, 5))])
def test_author_initializers_are_used_even_in_submodules(build, caplog):
    assert_drawn_as_built(build)
    assert logged(caplog) == []


def test_functions_with_other_signatures_are_not_called():
    class Other(nn.Linear):
        def init_weights(self, path):
            raise AssertionError

        def _init_weights(self, module, scale):
            raise AssertionError

    assert_drawn_as_built(lambda: Other(6, 6))


# --- log lines ---


def scaled(factor):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight.mul_(factor)
    return model


@pytest.mark.parametrize("factor", [0, 0.1, 10])
def test_weights_of_another_scale_are_logged_with_remedies(factor, caplog):
    model = scaled(factor)
    drawn(model)
    (line,) = logged(caplog)
    assert "'1.weight'" in line
    assert "'0.weight'" not in line
    assert "rho=egop.Recentered(scale)" in line
    assert "egop.Initialization(init_fn=...)" in line
    here = model[1].weight.detach().square().mean().sqrt().item()
    assert f"instead of {here:.2g}" in line


def test_each_log_line_appears_once_per_objective(caplog):
    model = scaled(10)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(0))]
    objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), batches)
    cases.estimate(objective, sampling="loop", samples=300)
    cases.estimate(objective, sampling="loop", samples=2)  # as a diagnosis does, until it has draws enough
    assert len(logged(caplog)) == 1


@pytest.mark.parametrize("case", cases.MODELS, ids=str)
def test_models_as_built_by_torch_log_nothing(case, caplog):
    drawn(case.build())
    drawn(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 3), nn.Embedding(2, 2)))
    assert logged(caplog) == []


def test_given_init_fn_logs_nothing(caplog):
    drawn(scaled(10), init_fn=lambda model: [nn.init.normal_(each) for each in model.parameters()])
    assert logged(caplog) == []
