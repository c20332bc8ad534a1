"""What the documents promise: every setting and every exit status is told, and every pip line is pinned."""

import re
from pathlib import Path

import pytest
import torch

from ravnest_fed import errors
from ravnest_fed.federation import known_settings
from ravnest_fed.messages import Reason
from ravnest_fed.partition import Partition
from ravnest_fed.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def error_classes() -> list[type[errors.RavnestError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RavnestError)]


@pytest.mark.parametrize("setting", known_settings())
def test_every_setting_stands_in_the_settings_page(setting: str) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    assert rows.count(setting) == 1


def test_the_settings_page_tells_of_no_setting_that_does_not_exist() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    assert set(rows) == set(known_settings())


@pytest.mark.parametrize("kind", error_classes())
def test_every_error_class_stands_with_its_exit_status(kind: type[errors.RavnestError]) -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs/exit-status.md").read_text(), re.MULTILINE)
    assert rows.count((str(kind.exit_status), kind.__name__)) == 1


def test_every_reason_of_a_refusal_stands_in_the_wire_format() -> None:
    text = (ROOT / "docs/wire-format.md").read_text()
    reasons = {value for name, value in vars(Reason).items() if name.isupper()}
    assert {reason for reason in reasons if f"`{reason}`" not in text} == set()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run", "examples/digits/README.md"])
def test_every_pip_line_is_pinned(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if re.search(r"\bpip install\b", line)]
    assert [line for line in lines if "-c constraints.txt" not in line] == []


def test_set_up_takes_one_line_and_the_tests_one_more() -> None:
    lines = re.findall(r"^    (python3 -m venv .*)$", README, re.MULTILINE)
    assert [line.rpartition("&& ")[2].split()[0] for line in lines] == [".venv/bin/ravnest-fed", ".venv/bin/python"]
    assert all("pip install -c constraints.txt" in line for line in lines)


def test_the_readme_has_the_test_line_that_ci_takes_from_it() -> None:
    pattern = re.search(r"sed -n 's/(.*)/\\1/p' README.md", (ROOT / ".ci/run").read_text())
    assert pattern is not None
    as_python = pattern[1].replace(r"\(", "(").replace(r"\)", ")")
    assert len(re.findall(as_python, README, re.MULTILINE)) == 1


def test_the_recipe_in_the_readme_works(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    (tmp_path / "recipe.py").write_text(code[1])
    loaded = load_recipe(tmp_path / "recipe.py")
    model = loaded.build_model()
    inputs, labels = loaded.train_data(Partition(0, 2, 0))
    assert len(inputs) == len(labels) > 0
    loss = loaded.loss(model, (inputs, labels))
    loss.backward()  # type: ignore[no-untyped-call]
    assert isinstance(loaded.build_optimizer(list(model.parameters())), torch.optim.Optimizer)
    measured = loaded.evaluate(model)
    assert measured is not None and 0.0 <= measured[0]["accuracy"] <= 1.0


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/settings.md"])
def test_links_within_the_documents_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
