"""What a user meets first: the import, the README, the example, the benchmark."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import zipfile
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
    for page in (
        ROOT / "README.md",
        *(ROOT / "docs" / f"{name}.md" for name in ("models", "convert", "data", "training", "analysis", "tutorial")),
    ):
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


# Every command that a page tells its reader to type, and what runs it: a test, often with something smaller, or a file
# that has the command in it.
COMMANDS = {
    r"make demo": "test_the_whole_demo",
    r"make test": ".ci/run",
    r"make bench": "test_benchmark_prints_its_ratios",
    r"make accuracy": "test_accuracy_is_measured",
    r"pip install -e \.": "Makefile",
    r"python examples/tiny_language_model\.py .*": "test_language_model_example_learns",
    r"python benchmarks/variant_costs\.py": "test_costs_are_those_that_are_counted",
    r"python benchmarks/cpu_attention\.py .*": "test_benchmark_prints_its_ratios",
    r"python benchmarks/instructions\.py .*": "test_instructions_of_a_pair_are_counted",
    r"python benchmarks/tiles\.py .*": "test_tiles_are_timed",
    r"python benchmarks/machine_code\.py .*": "test_one_kernel_has_the_machine_code_that_was_measured",
    r"python benchmarks/published_control\.py .*": "test_a_run_of_a_small_checkout",
    r"python benchmarks/same_start\.py .*": "test_every_control_gets_its_run",
    r"python benchmarks/compile_everywhere\.py .*": "test_the_kernels_compile_for_another_architecture",
    r"python benchmarks/host_time\.py .*": "test_the_page_has_the_committed_host_times",
    r"python benchmarks/compile_ahead\.py": "test_kernels_are_compiled_ahead",
    r"python benchmarks/padded_softmax\.py .*": "test_padded_candidates_are_right",
    r"python tests/transformers_suite .*": "test_the_suite_of_a_small_checkout",
    r"mgk generate .*": "test_language_model_example_learns",
    r"mgk import .*": "test_mgk_import",
    r"mgk uptrain .*": "test_mgk_uptrain",
    r"mgk compare .*": "test_mgk_compare",
    r"mgk weights .*": "test_a_wheel_becomes_a_folder",
    r"mgk demo( .*)?": "test_a_short_demo",
    r"mgk recipes( \S+)?": "test_recipes",
    r"mgk train [^-]*(--attention \S+ --heads \d+|--row \S+)?( \S+=\S+)*( --data \S+)?": "test_train_with_changes",
    r"mgk train \S+ --devices \d+( --strategy fsdp2)?": "test_the_command_with_shards",
    r"mgk evaluate .*": "test_evaluate_classification",
    r"mgk analyze .*": "test_analyze_a_run",
    r"mgk sweep .*": "test_sweep",
    r"mgk report .*": "test_report_from_the_command_line",
    r"mgk data prepare enwik8-words.*": "test_from_the_command_line",
    r"mgk data list": "test_list_names_every_corpus",
    r"mgk data prepare listops.*": "test_a_generated_corpus_needs_no_files",
    r"mgk data (prepare|inspect) imdb .*": "test_prepare_then_inspect",
    r"mgk bench attention.*": "test_attention_from_the_command_line",
    r"mgk bench retrieval.*": "test_retrieval_from_the_command_line",
    r"mgk bench decode.*": "test_decode_from_the_command_line",
    r"mgk bench packed.*": "test_packed_from_the_command_line",
    r"mgk bench linear.*": "test_linear_from_the_command_line",
    r"mgk bench rows .*": "test_rows_from_the_command_line",
    r"mgk bench (plot|table) .*": "test_what_is_made_of_a_result",
    r"mgk bench merge .*": "test_merge_from_the_command_line",
    r"mgk bench choose .*": "test_the_command_writes_what_the_library_reads",
    r"mgk reproduce .*": "test_pages_on_the_terminal",
    r"export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": "test_torchrun_starts_a_dead_rank_again",
    r"torchrun --standalone .*--max-restarts \d+ -m mgk train .*": "test_torchrun_starts_a_dead_rank_again",
    r"srun mgk train .*": "test_build_fabric_under_a_launcher",
    r"grep -rL .* runs \| .*": "test_the_command_of_the_docs_takes_the_runs_that_are_not_done",
}


def typed_commands(page: Path) -> list[str]:
    """The lines of all shell blocks, those with a backslash at the end joined, without comments."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in (re.sub(r"(^|\s)#.*", "", line) for line in lines) if line.strip()]


def test_every_command_in_the_docs_is_run_by_a_test(monkeypatch):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    commands = [command for page in pages for command in typed_commands(page)]
    assert "make test" in commands
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    used = set()
    for command in commands:
        patterns = [pattern for pattern in COMMANDS if re.fullmatch(pattern, command)]
        assert len(patterns) == 1, f"{command!r} must be run by a test that COMMANDS names, got {patterns}"
        used.add(patterns[0])
        runner, (program, name, *_) = COMMANDS[patterns[0]], command.split()
        if not runner.startswith("test_"):
            assert f"{program} {name}" in (ROOT / runner).read_text(), f"{runner} does not run {command!r}"
            continue
        homes = [text for text in tests.values() if f"\ndef {runner}(" in text]
        assert len(homes) == 1, f"{runner}, which runs {command!r}, must be one test, got {len(homes)}"
        if program == "make":
            assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        elif " -m mgk " in command or "mgk" in (program, name):
            words = shlex.split(command.partition("mgk ")[2])
            assert f'"{words[1] if words[0] == "data" else words[0]}"' in homes[0], f"{runner} does not run {command!r}"
            check_arguments(words, monkeypatch)
    # All of it is used, but for what a page might say again.
    assert set(COMMANDS) - used <= {r"mgk demo( .*)?"}


def check_arguments(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is typed is understood; a training gets as far as to the run itself."""
    import typer.main

    from mgk.cli import app
    from mgk.commands import training as commands
    from mgk.commands.sweep.plan import plan_cells
    from mgk.recipes import load

    found = typer.main.get_command(app)
    while hasattr(found, "commands"):
        found, words = found.commands[words[0]], words[1:]
    context = found.make_context(found.name, list(words))
    if found.name == "train":
        started = []
        monkeypatch.setattr(commands, "run", lambda config, folder, **options: started.append(config))
        found.invoke(context)
        assert len(started) == 1
    elif found.name == "sweep":
        if context.params["plan"] is not None:
            assert plan_cells(ROOT / context.params["plan"], Path("runs"))
            return
        recipe = load(context.params["recipe"])
        for row in recipe.rows if context.params["rows"] is None else context.params["rows"].split():
            recipe.config(row, context.params["changes"] or [])


def test_the_wheel_has_what_is_not_python(tmp_path):
    """Recipes, and the parts of the report's page."""
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name: archive.read(name) for name in archive.namelist()}
    source = ROOT / "src"
    kept = [
        path
        for path in source.rglob("*")
        if path.suffix in (".html", ".css", ".js", ".yaml") or path.name == "py.typed"
    ]
    assert {path.name for path in kept} >= {"page.html", "page.css", "explorer.js", "demo.yaml"}
    for path in kept:
        assert shipped[path.relative_to(source).as_posix()] == path.read_bytes(), path.name


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
    out = run("benchmarks/cpu_attention.py", "--shape", "1x64", "--repeats", "1", "--causal", "--backends")
    rows = re.findall(r"^ +(softmax|gaussian|smgk|mgk) +\d+ +(\w+) .*x$", out, re.MULTILINE)
    backends = ("auto", "cpu", "sdpa", "chunked", "reference")
    expected = [("softmax", "stock")] * 2 + [(name, each) for name in ("gaussian", "smgk", "mgk") for each in backends]
    assert sorted(rows) == sorted(expected * 2)


def test_instructions_of_a_pair_are_counted():
    """One of them anybody could count: an exponential."""
    pytest.importorskip("triton")
    out = run("benchmarks/instructions.py", "--preset", "gaussian", "--head-dim", "32")
    kernels = re.findall(r"head_dim 32, (\w+): ([\d.]+) a pair, \d+ registers, \d+ spills.*\n +(.*)", out)
    assert [name for name, *_ in kernels] == ["forward", "key_value", "query"]
    for _, total, counts in kernels:
        assert 4 < float(total) < 20
        assert 0.9 < float(re.search(r"MUFU ([\d.]+)", counts)[1]) < 1.2


@pytest.mark.gpu
def test_tiles_are_timed():
    tiles = ["64,64,4,2", "64,64,4,2,128,await_products"]
    arguments = [
        "--preset",
        "smgk",
        "--shape",
        "2,2,512,32",
        "--kernel",
        "forward",
        "--tile",
        tiles[0],
        "--tile",
        tiles[1],
    ]
    out = run("benchmarks/tiles.py", *arguments, "--processes", "2")
    assert sorted(re.findall(r"ms  (.*)", out)) == [*tiles, "of the table"]


@pytest.mark.gpu
def test_kernels_are_compiled_ahead():
    out = run("benchmarks/compile_ahead.py", "--preset", "softmax", "--processes", "8")
    assert re.fullmatch(r"8 calls compiled in \d+ s, 0 processes failed\n", out)


def load_benchmark(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_accuracy_is_measured(tmp_path, monkeypatch, capsys):
    """`make accuracy`, smaller, and not into the docs."""
    accuracy = load_benchmark("accuracy")
    monkeypatch.setattr(accuracy, "SEEDS", (0,))
    monkeypatch.setattr(accuracy, "SHAPE", {"batch": 1, "heads": 2, "tokens": 17, "head_dim": 8})
    page = accuracy.PAGE.read_text()
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--output", str(tmp_path)])
    accuracy.main()
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert f"wrote cpu.json: {len(rows)} rows" in capsys.readouterr().out
    assert len(rows) == 3 * 3 * 4 * 4
    assert all(0 < error < 0.5 for row in rows for error in row["relative_error"].values())
    assert all(row["relative_error"]["output"] < 1e-4 for row in rows if row["dtype"] == "float32")
    assert accuracy.PAGE.read_text() == page


@pytest.mark.parametrize(
    ("benchmark", "page"), [("accuracy", "numerics"), ("training", "training"), ("conversion_starts", "convert")]
)
def test_numbers_in_the_docs_come_from_results(benchmark, page):
    assert load_benchmark(benchmark).table() in (ROOT / "docs" / f"{page}.md").read_text()


def test_docs_name_tests_that_exist():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, name
        for path in re.findall(r"`(tests/[\w/.]+)`", page.read_text()):
            assert (ROOT / path).exists(), path


# Data flows downwards: a folder imports from itself and from those above it.
LAYERS = (
    "ops", "nn", "models", "conversion", "data", "evaluation", "training", "recipes", "analysis", "benchmark",
    "reproduction", "commands", "demo", "cli",
)  # fmt: skip


def imported_layers(path):
    """What a module imports of ours, inside functions, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("mgk."):
                yield name.split(".")[1]


def test_a_folder_imports_only_from_those_above_it():
    source = ROOT / "src" / "mgk"
    modules = [path for path in source.rglob("*.py") if path.parent != source or path.stem in LAYERS]
    assert {path.relative_to(source).parts[0].removesuffix(".py") for path in modules} == set(LAYERS)
    for path in modules:
        own = LAYERS.index(path.relative_to(source).parts[0].removesuffix(".py"))
        wrong = {name for name in imported_layers(path) if name in LAYERS and LAYERS.index(name) > own}
        assert not wrong, f"{path.relative_to(source)} imports {wrong}"


def test_the_architecture_page_has_the_layers_in_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == LAYERS


def test_every_change_has_a_place():
    """CONTRIBUTING.md answers where ten usual changes go; tests/test_docs.py looks at its links."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    changes = re.findall(r"^\| an? \*\*([\w ]+)\*\*", page, re.MULTILINE)
    expected = "preset, feature map, similarity, backend, GPU architecture, corpus, task, optimiser, metric, figure"
    assert changes == expected.split(", ")
