"""The pages of docs/ and the README: code runs, links lead somewhere, GitHub renders them, and they stay short."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import egop

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MADE = DOCS / "gallery-pages"  # by the build, from docs/gallery
PAGES = sorted(path for path in DOCS.rglob("*.md") if MADE not in path.parents)
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "lab/README.md")]
TEXTS = [*OTHERS, *sorted((ROOT / "lab" / "notes").glob("*.md")), *PAGES]
SCRIPTS = sorted((DOCS / "gallery").glob("*.py"))


def name_of(path):
    return str(path.relative_to(ROOT))


def code_of(path, kind="python"):
    return re.findall(rf"^```{kind}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


# The code of docs/theory.md needs the lab, whose tests run it.
WITH_CODE = [path for path in [ROOT / "README.md", *PAGES] if code_of(path) and path.name != "theory.md"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(path, tmp_path, monkeypatch):
    """Run a page's blocks in order, each with the variables of those before it and what readers are assumed to have."""
    monkeypatch.chdir(tmp_path)
    batches = [(torch.randn(5, 3), torch.randn(5, 2)) for _ in range(3)]
    model = network()
    given = {
        "torch": torch, "egop": egop, "network": network, "model": model, "loss_fn": loss_fn,
        "batches": batches, "batch": batches[0], "train_loader": batches, "folder": tmp_path / "checkpoints",
        "objective": egop.Objective(model, loss_fn, batches),
        "basis": egop.estimate(egop.Objective(model, loss_fn, batches), samples=8, progress=False),
        "optimizer": egop.EGOP(model),
        "DistributedDataParallel": DistributedDataParallel, "writer": Mock(), "wandb": Mock(), "step": 0,
    }  # fmt: skip
    for block in code_of(path):
        if block.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block, given, name_of(path), str(path), 0)
            said = []
            doctest.DocTestRunner().run(test, out=said.append)
            assert not said, "".join(said)
        else:
            exec(compile(block, name_of(path), "exec"), given)
    assert torch.cat([each.flatten() for each in given["model"].parameters()]).isfinite().all()


def test_code_that_does_not_run_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n```python\nnot_there\n```\n")
    with pytest.raises(NameError):
        exec(code_of(page)[0], {})


def anchors_of(path):
    """Return the anchors of a page: those that GitHub makes of its headings, and those written out."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def broken_links(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file = (path.parent / place).resolve() if place else path
        if not file.exists():
            yield f"{target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors_of(file):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(path):
    assert list(broken_links(path)) == []


def test_a_link_that_leads_nowhere_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](b.md) [c](#one) [d](#two) [e](page.md#three)\n")
    assert list(broken_links(page)) == [
        "b.md: no such file", "#two: no such heading", "page.md#three: no such heading"
    ]  # fmt: skip


# Named as public in docs/architecture.md; of each, what its __all__ offers.
PUBLIC = ["egop", "egop.optim", "egop.extras", "egop.basis", "egop.estimation", "egop.refresh"]


def public_names():
    """Yield every public name; for a class or function that several modules export, only the first one."""
    seen = set()
    for place in PUBLIC:
        module = importlib.import_module(place)
        for name in module.__all__:
            thing = getattr(module, name, None)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                if id(thing) in seen:
                    continue
                seen.add(id(thing))
            if f"{place}.{name}" not in PUBLIC:
                yield f"{place}.{name}"


def test_every_public_name_is_in_the_reference_and_nothing_else():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    listed = re.findall(r"^\.\. (?:auto\w+|py:data):: (\S+)$", text, flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    others = set(listed) ^ set(public_names())
    assert all(name.startswith("egop.diagnos") for name in others)  # what diagnose and find_lr return


def test_the_gallery_has_scripts_that_stand_alone():
    assert 6 <= len(SCRIPTS) <= 10
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        used = {alias.name for node in names if isinstance(node, ast.Import) for alias in node.names}
        used |= {node.module for node in names if isinstance(node, ast.ImportFrom)}
        packages = {each.partition(".")[0] for each in used}
        assert packages <= {"egop", "torch", "matplotlib", "math", "pathlib", "warnings"}, path.name
        assert re.match(r'"""\n.+\n=+\n\n', text), f"{path.name} begins with a title"


def pages_for_github():
    """Return the README and the pages that it links to."""
    links = re.findall(r"\]\(([^)\s#]+\.md)", (ROOT / "README.md").read_text(encoding="utf-8"))
    return [ROOT / "README.md", *(ROOT / link for link in dict.fromkeys(links))]


@pytest.mark.parametrize("path", pages_for_github(), ids=name_of)
def test_github_renders_the_pages_that_the_readme_links(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"^(```\{.*|:::.*|\(\w+\)=|: .*)$", text, flags=re.MULTILINE), (
        "directives show as text on GitHub"
    )


# Words of each page, code included. What is generated (the race's tables, the reproduction's details, the reference) is
# not counted.
LIMITS = {
    "CHANGELOG.md": 400,
    "CONTRIBUTING.md": 1000,
    "docs/architecture.md": 2500,
    "docs/results.md": 900,
    "docs/start.md": 750,
    "docs/theory.md": 1100,
    "docs/howto/learning-rate.md": 750,
    "docs/howto/variants.md": 750,
    "docs/reproduction.md": 950,  # generated, grows with the experiments
    "lab/README.md": 700,
}
TOTAL = 15_000


def count_words(path):
    """Count the words of a page, apart from the tables that are made from records."""
    return len(re.sub(r"<!-- race:.*?<!-- end -->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL).split())


def counted_pages():
    details = DOCS / "reproduction", DOCS / "reference"
    return [*OTHERS, *(page for page in PAGES if page.parent not in details)]


@pytest.mark.parametrize("path", counted_pages(), ids=name_of)
def test_a_page_is_short(path):
    assert count_words(path) <= LIMITS.get(name_of(path), 650)


def test_all_pages_together_are_short():
    assert sum(map(count_words, counted_pages())) <= TOTAL


@pytest.mark.parametrize("path", sorted((DOCS / "howto").glob("*.md")), ids=name_of)
def test_a_how_to_has_a_table(path):
    assert "\n|---" in path.read_text(encoding="utf-8")


def test_results_stand_on_two_pages_only():
    """The README and docs/results.md have the tables of the race; everything else links there."""
    marked = [name_of(path) for path in TEXTS if "<!-- race:" in path.read_text(encoding="utf-8")]
    assert marked == ["README.md", "docs/results.md"]


def test_the_readme_counts_claims_as_the_reproduction_does():
    said = re.search(
        r"(\d+) of its (\d+) claims hold here, (\d+) do not, (\d+) cannot", (ROOT / "README.md").read_text()
    )
    counted = re.search(
        r"Of the paper's (\d+) claims, (\d+) hold, (\d+) do not hold, (\d+) cannot",
        (DOCS / "reproduction.md").read_text(),
    )
    held, claims, *others = said.groups()
    assert (claims, held, *others) == counted.groups()
