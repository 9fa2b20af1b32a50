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


def faults(text, may_read_tensors=False):
    """What a module does that it must not, each with its line. One may call ``torch.load(..., weights_only=True)``."""
    tree = ast.parse(text)
    bases = {
        node.name: [dotted(base) for base in node.bases] for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    safe = SAFE_LOADERS | {name for name, found in bases.items() if found and set(found) <= SAFE_LOADERS}

    def reads_tensors_alone(name, options):
        allowed = options.get("weights_only")
        return may_read_tensors and name == "torch.load" and isinstance(allowed, ast.Constant) and allowed.value is True

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
        is_call = name in BUILT_IN or name in CALLS or name.startswith("torch.package")
        if is_call and not reads_tensors_alone(name, options):
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
# Of files of `torch.save` that other people have written: tensors alone, in a process that does nothing else.
READER = SOURCE / "models" / "pickled_tensors.py"


def test_there_is_something_to_look_at():
    assert len(FILES) > 60
    assert SOURCE / "training" / "snapshot.py" in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_that_is_read_can_run_code(path):
    assert faults(path.read_text(encoding="utf-8"), may_read_tensors=path == READER) == []


def test_the_reader_of_other_peoples_files_works_in_a_process_of_its_own():
    """Its one `torch.load` is in what only the child calls; and nobody else imports that."""
    tree = ast.parse(READER.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    callers = [name for name, node in functions.items() if "torch.load" in map(dotted, attributes(node))]
    assert callers == ["_read"]
    assert [name for name, node in functions.items() if "_read" in names_in(node)] == ["_main"]
    assert [name for name, node in functions.items() if "_main" in names_in(node)] == []
    assert not [path for path in FILES if path != READER and "pickled_tensors import _" in path.read_text()]
    (guard,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(guard.test) == "__name__ == '__main__'"
    assert "subprocess.run" in map(dotted, attributes(functions["read_tensors"]))


def attributes(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


def names_in(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize(
    "text", ["torch.load(x)", "torch.load(x, weights_only=False)", "torch.load(x, weights_only=y)"]
)
def test_what_the_reader_must_not_do_either(text):
    assert len(faults(text, may_read_tensors=True)) == 1
    assert faults("torch.load(x, weights_only=True)", may_read_tensors=True) == []


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
