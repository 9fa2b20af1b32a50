"""The pages in `docs/results` are those that the command would write now."""

import contextlib
import re
from pathlib import Path

import pytest

from mgk.reproduction import pages
from mgk.reproduction.page import markdown
from mgk.reproduction.readme import fill, results_text
from mgk.reproduction.results import read_results

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """All pages as they would be now, and the list of them; results have the name that they have in commands."""
    folder = tmp_path_factory.mktemp("pages")
    with contextlib.chdir(ROOT):
        results = read_results(Path("results"))
        found = {name: pages.build(name, results, folder) for name in pages.names()}
        index = pages.write_index(list(found.values()), results, folder).read_text()
        return found, index, results_text(list(found.values()), results)


@pytest.mark.parametrize("name", pages.names())
def test_a_page_is_what_the_results_say(built, name):
    page = built[0][name]
    assert (FOLDER / f"{name}.md").read_text() == markdown(page), f"run mgk reproduce {name}, or all"
    assert {path.name for path in page.pictures} == {path.name for path in FOLDER.glob(f"{name}[.-]*png")}


def test_the_list_of_pages_is_up_to_date(built):
    assert (FOLDER / pages.INDEX).read_text() == built[1], "run mgk reproduce all"


def test_the_readme_is_up_to_date(built, tmp_path):
    path = tmp_path / "README.md"
    path.write_text((ROOT / "README.md").read_text())
    assert fill(path, built[2])
    assert path.read_text() == (ROOT / "README.md").read_text(), "run mgk reproduce all"


def test_links_lead_somewhere():
    for page in FOLDER.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_nothing_of_another_page_is_left():
    known = {f"{name}.md" for name in pages.names()} | {pages.INDEX}
    assert {path.name for path in FOLDER.glob("*.md")} == known


def test_pages_have_no_path_of_a_machine():
    for page in FOLDER.glob("*.md"):
        assert not re.search(r"/(home|root|tmp|work)/", page.read_text()), page.name
