"""The command that runs the tests of transformers on our models, with a checkout that has only a few tests of ours."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "transformers_suite"

# What the command takes from a checkout, by its name there, as small as can be.
CHECKOUT = {
    "tests/__init__.py": "",
    "tests/generation/__init__.py": "",
    "tests/pipelines/__init__.py": "",
    "tests/pipelines/test_pipelines_feature_extraction.py": "IMAGE_PROCESSOR_MAPPING = None",
    "tests/test_configuration_common.py": """
class ConfigTester:
    def __init__(self, parent, config_class):
        self.config_class = config_class

    def run_common_tests(self):
        assert self.config_class.model_type == "mgk"
""",
    "tests/test_pipeline_mixin.py": """
import os
from pathlib import Path
from transformers import AutoTokenizer

class PipelineTesterMixin:
    def run_pipeline_test(self, task, repo_name):
        folder = Path(os.environ["TRANSFORMERS_TINY_MODEL_PATH"], "mgk", repo_name)
        model = self.pipeline_model_mapping[task].from_pretrained(folder)
        model(**AutoTokenizer.from_pretrained(folder)("a text", return_tensors="pt"))

    def test_pipeline_text_generation(self):
        if "text-generation" not in self.pipeline_model_mapping:
            self.skipTest("`text-generation` is not in `self.pipeline_model_mapping`")
        self.run_pipeline_test("text-generation", "MGKForCausalLM")
""",
    "tests/test_modeling_common.py": """
import torch

def ids_tensor(shape, size):
    return torch.randint(size, shape)

class ModelTesterMixin:
    def _prepare_for_class(self, inputs, model_class, return_labels=False):
        return dict(inputs)

    def test_forward(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            assert config.attention == self.model_tester.preset
            model_class(config)(**self._prepare_for_class(inputs, model_class))

    def test_that_no_model_passes(self):
        raise AssertionError("no model passes")
""",
    "tests/generation/test_utils.py": """
class GenerationTesterMixin:
    def test_custom_4d_attention_mask(self):
        pass

    def test_assisted_decoding_sample(self):
        if self.model_tester.preset == "mlk":
            raise ValueError("the assistant must be able to take tokens back")
""",
    "tests/causal_lm_tester.py": """
from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_pipeline_mixin import PipelineTesterMixin

class CausalLMModelTester:
    def __init__(self, parent):
        self.vocab_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 50, 16, 1, 2
        self.num_key_value_heads, self.intermediate_size, self.hidden_act = 2, 16, "gelu"
        self.max_position_embeddings, self.pad_token_id, self.bos_token_id, self.eos_token_id = 64, 0, 1, 2
        self.batch_size, self.seq_length, self.tie_word_embeddings = 2, 5, False

    def prepare_config_and_inputs(self):
        tokens = ids_tensor((self.batch_size, self.seq_length), self.vocab_size)
        return self.get_config(), tokens, None, tokens.new_ones(tokens.shape), None, None, None

    def prepare_config_and_inputs_for_common(self):
        config, tokens, _, mask, *_ = self.prepare_config_and_inputs()
        return config, {"input_ids": tokens, "attention_mask": mask}

class CausalLMModelTest(ModelTesterMixin, GenerationTesterMixin, PipelineTesterMixin):
    def setUp(self):
        self.model_tester = self.model_tester_class(self)

    def test_sequence_classification_model(self):
        self.skipTest("not here")

    test_sequence_classification_model_for_single_label = test_sequence_classification_model
    test_sequence_classification_model_for_multi_label = test_sequence_classification_model
""",
}


@pytest.fixture
def suite(monkeypatch):
    """The command as a module."""
    monkeypatch.syspath_prepend(str(SUITE))
    spec = importlib.util.spec_from_file_location("transformers_suite_command", SUITE / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("not_applicable", None)


def test_the_suite_of_a_small_checkout(tmp_path):
    for name, text in CHECKOUT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(SUITE), str(tmp_path), "--preset", "smgk", "--preset", "mlk"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    said = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout + done.stderr
    models = ("decoder", "encoder", "seq2seq")
    failed = {line.split(":")[0] for line in said if line.startswith("FAILED")}
    assert failed == {f"FAILED {m}_{p} test_that_no_model_passes" for m in models for p in ("smgk", "mlk")}
    assert [line.split(":")[0] for line in said if line.startswith("STALE")] == [
        "STALE decoder_mlk test_custom_4d_attention_mask"
    ]
    # Passed, skipped, not applicable, failed and stale.
    counts = {tuple(line.split()[:2]): line.split()[2:] for line in said if line.startswith(models)}
    assert counts == {
        ("decoder", "smgk"): ["4", "3", "0", "1", "0"],
        ("decoder", "mlk"): ["2", "3", "1", "1", "1"],
        ("encoder", "smgk"): ["2", "4", "0", "1", "0"],
        ("encoder", "mlk"): ["2", "4", "0", "1", "0"],
        ("seq2seq", "smgk"): ["4", "1", "0", "1", "0"],
        ("seq2seq", "mlk"): ["3", "1", "1", "1", "0"],
    }


def test_when_the_suite_is_content(suite):
    outcomes = suite.Outcomes()
    outcomes.of_test = {
        ("decoder_smgk", "test_save_load"): "passed",
        ("decoder_mlk", "test_assisted_decoding_sample"): "failed",
        ("decoder_mlk", "test_flash"): "skipped",
    }
    refusal = "ValueError: the assistant must be able to take tokens back, got a stateful model"
    outcomes.reasons = dict(zip(outcomes.of_test, ("", refusal, "no GPU"), strict=True))
    text, is_fine = suite.summary(outcomes)
    assert is_fine
    assert "1 x no GPU" in text
    assert "1 x test_assisted_decoding_sample: tries tokens and takes them back" in text
    outcomes.reasons["decoder_mlk", "test_assisted_decoding_sample"] = "ImportError: no such module"
    text, is_fine = suite.summary(outcomes)
    assert not is_fine, "another error than the one that is known"
    assert "FAILED decoder_mlk test_assisted_decoding_sample: ImportError" in text
    outcomes.reasons["decoder_mlk", "test_assisted_decoding_sample"] = refusal
    outcomes.broken.append("models.py: ImportError")
    assert not suite.summary(outcomes)[1]
    assert not suite.summary(suite.Outcomes())[1], "nothing was run"
