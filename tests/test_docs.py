"""The pages say what is so: their links lead somewhere, what they name as a proof exists, their tables are counted."""

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mgk
from mgk.recipes.paper import published

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[tuple[str, str]]:
    """What is shown, and where it leads; no addresses of the web."""
    found = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", without_code(page.read_text()))
    return [(shown, target) for shown, target in found if "://" not in target]


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        again = found.count(slug)
        found.append(f"{slug}-{again}" if again else slug)
    return set(found)


@functools.cache
def defined_names(path: Path) -> set[str]:
    """Functions, classes and methods."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


@every_page
def test_links_and_anchors_lead_somewhere(page):
    for _, target in links(page):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}: no such heading"


@every_page
def test_a_link_to_code_names_what_is_there(page):
    """A test as a proof, or the function in which an equation lives."""
    for shown, target in links(page):
        name = re.fullmatch(r"`(\w+)`", shown)
        if name and target.endswith(".py"):
            assert name[1] in defined_names((page.parent / target).resolve()), f"{target} has no {name[1]}"


def table_rows(page: Path) -> list[list[str]]:
    """The cells of all tables but their heads."""
    lines = without_code(page.read_text()).splitlines()
    rows = [line for line, following in zip(lines, [*lines[1:], ""], strict=True) if not is_rule(following)]
    rows = [row for row in rows if row.startswith("|") and not is_rule(row)]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def is_rule(line: str) -> bool:
    return bool(re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", line))


def test_every_statement_has_its_proof():
    """A test, a page of results, or a JSON, at the end."""
    text = (DOCS / "what-is-true.md").read_text()
    statements = re.findall(r"^- .*\n(?:  .*\n)*", text, re.MULTILINE)
    assert len(statements) > 40
    for statement in statements:
        targets = re.findall(r"\]\(([^)\s]+)\)", statement)
        tests = [target for target in targets if target.startswith("../tests/")]
        measured = [target for target in targets if re.match(r"(\.\./results/|results/|numerics|benchmarks)", target)]
        assert tests or measured, statement
        assert len(tests) == len(re.findall(r"\[`test_\w+`\]\(\.\./tests/", statement)), statement
        assert statement.endswith(")\n"), statement


def test_what_works_with_what_has_its_test_and_version():
    """A line of docs/compatibility.md without a test would be a promise."""
    page = DOCS / "compatibility.md"
    rows = table_rows(page)
    assert len(rows) > 20
    for row in rows:
        line = " | ".join(row)
        assert re.search(r"\[`test_\w+`\]\(\.\./tests/[\w/]+\.py\)", line) or "tests/transformers_suite" in line, line
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned["PyTorch"], pinned["PEFT"], pinned["lm-eval"] = pinned["torch"], pinned["peft"], pinned["lm_eval"]
    text = page.read_text()
    named = re.findall(r"^## ([\w-]+) \(([\d.]+)\)$", text, re.MULTILINE)
    named += re.findall(r"^\| ([\w-]+)[^|]*\| (\d[\d.]+) \|", text, re.MULTILINE)
    assert {name for name, _ in named} >= {"PyTorch", "transformers", "accelerate", "PEFT", "torchao", "lm-eval"}
    for name, version in named:
        assert pinned[name] == version, name


def load_costs():
    spec = importlib.util.spec_from_file_location("variant_costs", ROOT / "benchmarks" / "variant_costs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_costs_are_those_that_are_counted(tmp_path, monkeypatch, capsys):
    costs = load_costs()
    copy = tmp_path / "choosing.md"
    copy.write_text(costs.PAGE.read_text().replace(costs.table(), "| old |"))
    assert copy.read_text() != costs.PAGE.read_text()
    monkeypatch.setattr(costs, "PAGE", copy)
    costs.main()
    assert "wrote the table" in capsys.readouterr().out
    assert copy.read_text() == (DOCS / "choosing.md").read_text(), "run python benchmarks/variant_costs.py"


def load_word_corpus():
    spec = importlib.util.spec_from_file_location("word_corpus", ROOT / "benchmarks" / "word_corpus.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_numbers_of_the_word_corpus_are_those_that_were_measured(tmp_path, monkeypatch, capsys):
    script = load_word_corpus()
    content = json.loads(script.OUTPUT.read_text())
    copy = tmp_path / "data.md"
    copy.write_text(script.PAGE.read_text().replace(script.table(content), "| old |"))
    assert copy.read_text() != script.PAGE.read_text()
    monkeypatch.setattr(script, "PAGE", copy)
    monkeypatch.setattr(sys, "argv", ["word_corpus.py"])
    script.main()
    assert "wrote the table" in capsys.readouterr().out
    assert copy.read_text() == (DOCS / "data.md").read_text(), "run python benchmarks/word_corpus.py"


def test_a_mixture_saves_nothing_by_itself():
    cost = load_costs().cost
    softmax, half = cost("softmax", 8), cost("smgk", 4)
    assert all(mine > its for mine, its in zip(cost("mgk", 8), softmax, strict=True))
    assert all(mine >= its for mine, its in zip(cost("smgk", 8), softmax, strict=True))
    assert all(mine < 0.51 * its for mine, its in zip(half, softmax, strict=True))
    assert cost("smgk", 4, num_components=4).cache_bytes == half.cache_bytes
    assert cost("mgk", 4, num_components=4).flops > softmax.flops


def test_half_the_heads_are_faster_where_the_page_says_so():
    """What README.md, choosing.md and what-is-true.md say of the tables of benchmarks.md."""
    run = json.loads((ROOT / "results" / "bench" / "attention-h200.json").read_text())
    rows, softmax = ([each for each in run[name] if not each.get("sweep")] for name in ("rows", "baselines"))
    assert all(2 * row["heads"] == row["baseline_heads"] for row in rows)
    found = {(row["preset"], row["backend"], row["tokens"], row["head_dim"]): row for row in rows}
    shapes = {key[2:] for key in found}
    assert len(shapes) == 4
    for shape in shapes:
        smgk, mgk = (found[preset, "triton", *shape] for preset in ("smgk", "mgk"))
        # x is never the larger one.
        for direction in ("forward", "training"):
            assert 1 < smgk[f"{direction}_ratio_of_all"] <= smgk[f"{direction}_ratio"]
        fused = [each for each in softmax if (each["tokens"], each["head_dim"]) == shape]
        assert {each.get("backend") for each in fused} == {None, "triton"}
        assert all(smgk["peak_bytes"] < each["peak_bytes"] for each in fused)
        assert mgk["forward_ratio_of_all"] == pytest.approx(1, abs=0.1)
        expected = pytest.approx(1, abs=0.1) if shape[1] < 128 else pytest.approx(0.8, abs=0.1)
        assert mgk["training_ratio_of_all"] == expected
        for preset in ("smgk", "gaussian", "mgk"):
            ours, flex = (found[preset, backend, *shape] for backend in ("triton", "flex"))
            assert flex["forward_ms"] > ours["forward_ms"]
            assert flex["training_ms"] > ours["training_ms"]


@pytest.mark.parametrize("row", ["smgk-4", "mgk-4"])
def test_table_1_does_not_bear_out_its_sentence(row):
    """Half the heads better on every task: not on Text."""
    numbers = {name: published("lra/text", name)["test_accuracy"] for name in (row, "softmax-8")}
    assert numbers[row] < numbers["softmax-8"]


def test_learned_priors_of_the_paper_are_nearly_uniform():
    """Its Table 8."""
    numbers = [published("lra/retrieval", row) for row in ("smgk-1", "mgk-1")]
    priors = [row[f"prior_{r}_layer_{layer}"] for row in numbers for r in (1, 2) for layer in (1, 2)]
    assert max(abs(prior - 0.5) for prior in priors) == pytest.approx(0.012)


def tensors(*, components=2, dim=16, heads=1, keys=16, dtype=torch.float32):
    query = torch.randn(1, 2, 16, dim, dtype=dtype)
    key = torch.randn(1, 2 // heads, components, keys, dim, dtype=dtype)
    return query, key, torch.randn(1, 2 // heads, keys, dim, dtype=dtype)


def attend(backend, shape=None, **options):
    return mgk.mixture_attention(*tensors(**(shape or {})), backend=backend, **options)


def mixtures(backend):
    query, key, value = tensors()
    attend(backend)
    mgk.mixture_attention(query, key[:, :, 0], value, shift=torch.randn(2, 2, 16), backend=backend)


def masks(backend):
    keep = torch.ones(1, 16, dtype=torch.bool)
    attend(backend, key_mask=keep, query_mask=keep, attn_mask=torch.ones(16, 16, dtype=torch.bool))


def statistics(backend):
    mgk.mixture_log_density(*tensors()[:2], backend=backend)
    mgk.mixture_responsibilities(*tensors()[:2], backend=backend)


def linear(backend, *feature_maps):
    for feature_map in feature_maps:
        mgk.linear_mixture_attention(*tensors(), feature_map=feature_map, backend=backend)


def second_derivatives(backend):
    query, key, value = tensors()
    query.requires_grad_()
    out = mgk.mixture_attention(query, key, value, backend=backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    gradient.sum().backward()


CALLS = {
    "soft mixtures, projected and shifted": mixtures,
    "unequal variances": lambda backend: attend(backend, variance=torch.tensor([4.0, 5.0])),
    "masks of keys, queries and pairs": masks,
    "grouped heads, cross attention": lambda backend: attend(backend, {"heads": 2, "keys": 21}),
    "hard assignment": lambda backend: attend(backend, assignment="hard"),
    "dropout on a mixture": lambda backend: attend(backend, dropout_p=0.1),
    "dropout on a mixture, above 0.96875": lambda backend: attend(backend, dropout_p=0.98),
    "log density, responsibilities": statistics,
    "linear attention, `elu` and `relu`": lambda backend: linear(backend, "elu", "relu"),
    "linear attention, `dpfp` and `favor`": lambda backend: linear(backend, "dpfp", "favor"),
    "fp64": lambda backend: attend(backend, {"dtype": torch.float64}),
    "more than 8 components": lambda backend: attend(backend, {"components": 9}),
    "heads wider than 256": lambda backend: attend(backend, {"dim": 264}),
    "second derivatives": second_derivatives,
}


def served(backend: str) -> dict[str, str]:
    """A call that cannot be served is refused, and not by accident: the message names the backend."""
    answers = {}
    for name, call in CALLS.items():
        try:
            call(backend)
        except (ValueError, NotImplementedError) as error:
            if "backend" not in str(error):
                raise
            answers[name] = "no"
        else:
            answers[name] = "yes"
    return answers


BACKENDS = ("reference", "chunked", "cpu", "sdpa", "triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_table_of_backends_is_true(backend):
    column = 1 + BACKENDS.index(backend)
    written = {row[0]: row[column] for row in table_rows(DOCS / "choosing.md") if len(row) == 6}
    if backend == "triton":
        # The interpreter has to be there before torch and Triton are.
        code = "import json, test_docs; print(json.dumps(test_docs.served('triton')))"
        paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
        call = [sys.executable, "-c", code]
        done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout) == written
    else:
        assert served(backend) == written
