"""Nothing that is read can run code: no pickle, no eval, and YAML without types, anywhere in the library."""

import ast
from pathlib import Path

import pytest

import mgk

SOURCE = Path(mgk.__file__).parent
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "copyreg"}
BUILT_IN = {"eval", "exec", "compile", "__import__"}
# By their last names, since torch and numpy are imported under their usual ones everywhere (ruff sees to that).
CALLS = {"torch.load", "torch.save", "torch.package", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "SafeLoader", "CSafeLoader"}


def dotted(node):
    """``torch.load`` of ``torch.load(...)``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(text):
    """What a module does that it must not, each with its line."""
    tree = ast.parse(text)
    bases = {
        node.name: [dotted(base) for base in node.bases] for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    safe = SAFE_LOADERS | {name for name, found in bases.items() if found and set(found) <= SAFE_LOADERS}

    def wrong(node):
        if isinstance(node, ast.Import):
            yield from (f"imports {alias.name}" for alias in node.names if alias.name.split(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            names = {alias.name for alias in node.names}
            if module in MODULES or (module in ("torch", "yaml", "numpy") and names & {"load", "save", "unsafe_load"}):
                yield f"imports {', '.join(sorted(names))} from {module}"
        if not isinstance(node, ast.Call):
            return
        name = dotted(node.func)
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in BUILT_IN or name in CALLS or name.startswith("torch.package"):
            yield f"calls {name}"
        if name in ("np.load", "numpy.load"):
            allowed = options.get("allow_pickle")
            if not (isinstance(allowed, ast.Constant) and allowed.value is False):
                yield f"calls {name} without allow_pickle=False"
        if name == "yaml.load":
            loader = options.get("Loader", node.args[1] if len(node.args) > 1 else None)
            if loader is None or dotted(loader) not in safe:
                yield f"calls {name} with a loader that is not safe"
        if name.endswith(".from_pretrained") and "trust_remote_code" in options:
            yield f"calls {name} with trust_remote_code"

    return [f"line {node.lineno} {fault}" for node in ast.walk(tree) for fault in wrong(node)]


FILES = sorted(SOURCE.rglob("*.py"))


def test_there_is_something_to_look_at():
    assert len(FILES) > 60
    assert SOURCE / "training" / "snapshot.py" in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_that_is_read_can_run_code(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "import pickle as p", "from pickle import loads", "def f():\n  import dill",
        "import joblib.memory", "import os, marshal", "from torch import load", "from numpy import load",
        "torch.load(x)",
        "torch.load(x, weights_only=True)", "torch.save(x, y)", "np.load(x)", "np.load(x, allow_pickle=True)",
        "np.load(x, allow_pickle=flag)", "numpy.load(x, 'r')", "yaml.load(x)", "yaml.load(x, yaml.Loader)",
        "yaml.load(x, Loader=yaml.FullLoader)", "class L(yaml.UnsafeLoader): pass\nyaml.load(x, Loader=L)",
        "class L(yaml.SafeLoader, Other): pass\nyaml.load(x, Loader=L)", "yaml.unsafe_load(x)", "yaml.full_load(x)",
        "eval(x)", "exec(x)", "__import__(x)", "compile(x, '', 'exec')", "torch.package.PackageImporter(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_what_would_be_found(text):
    assert len(faults(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "np.load(x, mmap_mode='r', allow_pickle=False)", "yaml.safe_load(x)", "yaml.load(x, Loader=yaml.SafeLoader)",
        "class L(yaml.SafeLoader): pass\nyaml.load(x, Loader=L)", "model.eval()", "model.compile()", "re.compile(x)",
        "torch.compile(x)", "json.load(x)", "pickled = 3", "np.save(x, y, allow_pickle=False)",
    ],
)  # fmt: skip
def test_what_is_fine(text):
    assert faults(text) == []
