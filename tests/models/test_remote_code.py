"""A saved model in a process that has imported nothing but transformers."""

import json
import os
import subprocess
import sys

import pytest
import torch
from model_cases import make_inputs, make_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mgk.models import MGKConfig, MGKForCausalLM, MGKModel
from mgk.models.remote_code import CLASSES, MODULE

KINDS = {
    "modern": "AutoModelForCausalLM",
    "classifier": "AutoModelForSequenceClassification",
    "translation": "AutoModel",
}

# What a user does who knows transformers only. Starting a process takes seconds, so one does it all: it asks without
# trust, then where mgk cannot be found, and then as it should be. Nothing of ours is imported before that.
CODE = """
import json, sys
import torch
import transformers

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "mgk":
            raise ModuleNotFoundError(f"No module named {name!r}")

def error_of(folder, **options):
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

root, kinds, inputs = json.load(open(sys.argv[1]))
found = {"untrusted": error_of(f"{root}/modern")}
sys.meta_path.insert(0, Hidden)
found["missing"] = error_of(f"{root}/modern", trust_remote_code=True)
sys.meta_path.remove(Hidden)
found["imported before"] = [name for name in sys.modules if name.partition(".")[0] == "mgk"]
for kind, auto in kinds.items():
    model = getattr(transformers, auto).from_pretrained(f"{root}/{kind}", trust_remote_code=True, dtype=torch.float64)
    with torch.no_grad():
        out = model.eval()(**{name: torch.tensor(values) for name, values in inputs[kind].items()})[0]
    found[kind] = [type(model).__module__, type(model).__name__, out.flatten().tolist()]
    model.save_pretrained(f"{root}/{kind}-again")
# What transformers asked before stands in a line of its own.
print()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for kind in KINDS:
        make_model(kind).save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    """What the other process printed."""
    inputs = {kind: {name: each.tolist() for name, each in make_inputs(kind).items()} for kind in KINDS}
    (folder / "asked.json").write_text(json.dumps([str(folder), KINDS, inputs]))
    # Its own folder takes what transformers copies before it runs it.
    environment = {**os.environ, "HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(folder / "asked.json")], capture_output=True, text=True,
        check=False, env=environment, stdin=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_trust_remote_code_where_only_transformers_is_imported(kind, folder, seen):
    """The class is our own, the numbers are the model's, and what that process saves is what it loaded."""
    assert seen["imported before"] == []
    model = make_model(kind).cpu()
    if KINDS[kind] == "AutoModel":
        model = model.model
    module, name, values = seen[kind]
    assert module.startswith("mgk.models.")
    assert name == type(model).__name__
    with torch.no_grad():
        expected = model(**{key: tensor.cpu() for key, tensor in make_inputs(kind).items()})[0].flatten()
    torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)
    # No copies of our source files: one module that imports them.
    again = folder / f"{kind}-again"
    assert [path.name for path in again.glob("*.py")] == [f"{MODULE}.py"]
    assert (again / f"{MODULE}.py").read_bytes() == (folder / kind / f"{MODULE}.py").read_bytes()


def test_without_trust_the_error_says_what_to_do(seen):
    assert seen["untrusted"].startswith("ValueError: ")
    assert "Please pass the argument `trust_remote_code=True`" in seen["untrusted"]


def test_without_the_library_the_error_names_it(seen):
    assert "packages that were not found in your environment: mgk" in seen["missing"]


def test_what_a_configuration_names_is_there(tmp_path):
    """Every class of `auto_map` is one that the module imports, and with ours registered it is not even run."""
    for config in (MGKConfig(hidden_size=64), MGKConfig(hidden_size=64, is_encoder_decoder=True)):
        config.save_pretrained(tmp_path)
        names = json.loads((tmp_path / "config.json").read_text())["auto_map"]
        assert {name.partition(".")[0] for name in names.values()} == {MODULE}
        assert {name.partition(".")[2] for name in names.values()} <= set(CLASSES)
    (tmp_path / f"{MODULE}.py").write_text("raise AssertionError('this module was run')")
    MGKModel(MGKConfig(hidden_size=64)).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / f"{MODULE}.py").write_text("raise AssertionError('this module was run')")
    MGKModel.from_pretrained(tmp_path / "model", trust_remote_code=True)


def test_a_tokenizer_beside_the_model_is_left_alone(tmp_path):
    """Either may be saved first; both load, with and without `trust_remote_code`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    model = make_model("modern")
    for order in ((tokenizer, model), (model, tokenizer)):
        folder = tmp_path / type(order[0]).__name__
        for each in order:
            each.save_pretrained(folder)
        for trust in (None, True):
            assert AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)("a b c")["input_ids"] == [1, 2, 0]
        assert type(MGKForCausalLM.from_pretrained(folder)) is MGKForCausalLM
