"""What a user meets first: the import, the README, the example, the benchmark."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import relative_error

import mgk

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    finished = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr[-2000:]
    return finished.stdout


def test_import_needs_torch_only():
    """Neither triton nor any model library is loaded, and our own part of the import takes no time to speak of."""
    heavy = "triton", "transformers", "lightning", "matplotlib", "torch._dynamo", "torch._inductor"
    out = run(
        "-c",
        "import sys, time, torch; before = set(sys.modules); start = time.perf_counter(); import mgk;"
        "print(time.perf_counter() - start, *sorted({name for name in sys.modules} - before))",
    ).split()
    assert float(out[0]) < 3.0
    assert not [name for name in out[1:] if name.startswith(heavy)]


def test_public_names():
    assert set(mgk.__all__) <= set(dir(mgk))
    assert all(getattr(mgk, name).__doc__ for name in mgk.__all__)


def test_version_matches_the_changelog():
    assert re.search(rf"^## {re.escape(mgk.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_code_in_the_docs_runs():
    for page in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("models", "data", "training"))):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        assert blocks
        for block in blocks:
            exec(compile(block, page.name, "exec"), {})


def test_language_model_example_learns(tmp_path):
    """The two commands of the README, shorter."""
    out = run(
        "examples/tiny_language_model.py", "README.md", "docs/models.md", "--folder", str(tmp_path), "--steps", "30"
    )
    first, last = map(float, re.search(r"nats per byte: ([\d.]+) at the first step, ([\d.]+) over", out).groups())
    assert last < first - 1
    written = run("-m", "mgk", "generate", str(tmp_path), "Attention", "--temperature", "0.8", "--max-new-tokens", "20")
    assert written.startswith("Attention")


def test_readme_commands_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", readme, re.MULTILINE))
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def load_example():
    spec = importlib.util.spec_from_file_location("minimal", ROOT / "examples" / "minimal.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_minimal_example_is_the_library():
    minimal = load_example()
    x = torch.randn(2, 17, 12).double()
    w_q, w_k, w_v = torch.randn(3, 4, 12, 6).double()
    w_k2 = torch.randn(4, 3, 12, 6).double()
    shift, prior = torch.randn(4, 3, 6).double(), torch.randn(4, 3).double().softmax(-1)

    def project(weight):
        return torch.einsum("bne,hed->bhnd", x, weight)

    keys = torch.einsum("bne,hred->bhrnd", x, w_k2)
    for backend in ("reference", "chunked", "sdpa"):
        options = {"log_prior": prior.log(), "backend": backend}
        library = mgk.mixture_attention(project(w_q), keys, project(w_v), **options)
        assert relative_error(minimal.mgk(x, w_q, w_k2, w_v, prior), library) < 1e-12
        library = mgk.mixture_attention(project(w_q), project(w_k), project(w_v), shift=shift, **options)
        assert relative_error(minimal.smgk(x, w_q, w_k, shift, w_v, prior), library) < 1e-12


def test_minimal_example_runs_and_is_short():
    difference = float(run("examples/minimal.py").split()[-1])
    assert difference < 1e-5
    code = (ROOT / "examples" / "minimal.py").read_text().splitlines()
    assert len(code) <= 75


def test_picture_is_drawn_by_the_library(tmp_path):
    run("examples/attention_regions.py", str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes()[1:4] == b"PNG"


def test_benchmark_prints_its_ratios():
    out = run("benchmarks/cpu_attention.py", "--tokens", "128", "--repeats", "1", "--batch", "1")
    rows = re.findall(r"^ +(softmax|gaussian|smgk|mgk) +\d+ .*x$", out, re.MULTILINE)
    assert sorted(rows) == sorted(["softmax", "gaussian", "smgk", "mgk"] * 2)


@pytest.mark.parametrize(("benchmark", "page"), [("accuracy", "numerics"), ("training", "training")])
def test_numbers_in_the_docs_come_from_results(benchmark, page):
    spec = importlib.util.spec_from_file_location(benchmark, ROOT / "benchmarks" / f"{benchmark}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in (ROOT / "docs" / f"{page}.md").read_text()


def test_docs_name_tests_that_exist():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, name
        for path in re.findall(r"`(tests/[\w/.]+)`", page.read_text()):
            assert (ROOT / path).exists(), path
