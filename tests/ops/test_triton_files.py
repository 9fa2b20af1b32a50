"""docs/kernels.md says of every file of the fused kernels what it is for, and its glossary uses names of the code."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "mgk" / "ops" / "triton"
PAGE = (ROOT / "docs" / "kernels.md").read_text()


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_table_of_files_is_the_tree():
    """One line for each, and none for a file that is gone."""
    named = re.findall(r"^\| \[`([\w/]+\.py)`\]\(([\w/.]+)\) \| (.+) \|$", section("The files"), re.MULTILINE)
    for name, target, purpose in named:
        assert (ROOT / "docs" / target).resolve() == SOURCE / name
        assert len(purpose) <= 200, f"{name}: one line"
    tree = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    assert sorted(name for name, *_ in named) == sorted(tree)


def test_the_glossary_has_no_word_that_the_kernels_do_not_use():
    """A name in backticks that is a name of the code must still be one."""
    code = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    for name in re.findall(r"`([a-z]{2,}_[a-z_]+)(?:\[[^`]*\])?`", section("Glossary")):
        assert re.search(rf"\b\w*{name}\b", code), name
    for name in re.findall(r"^(?:\d\. )?.*?`(\w+_\w+)`", section("What a call launches"), re.MULTILINE):
        assert f"def {name}(" in code, name
