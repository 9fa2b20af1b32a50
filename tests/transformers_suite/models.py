"""Our models as the tests of transformers want to see them: one class of tests for each kind of model and preset.

``python tests/transformers_suite`` runs this file, with the checkout's package ``tests`` in front of any other.
"""

import os
import unittest
from typing import Any

import torch
import transformers
from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester
from tests.generation.test_utils import GenerationTesterMixin
from tests.pipelines import test_pipelines_feature_extraction as feature_extraction
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from tests.test_pipeline_mixin import PipelineTesterMixin
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

from mgk.models import (
    MGKConfig,
    MGKForCausalLM,
    MGKForSeq2SeqLM,
    MGKForSequenceClassification,
    MGKForSequencePairClassification,
    MGKModel,
    MGKSeq2SeqModel,
)
from mgk.nn import PRESETS

# The tests know from these tables of names which models have labels, and of which shape. Models that are registered
# from outside are in other tables.
auto.MODEL_MAPPING_NAMES["mgk"] = (MGKModel.__name__, MGKSeq2SeqModel.__name__)
auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mgk"] = MGKForCausalLM.__name__
auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["mgk"] = MGKForSeq2SeqLM.__name__
auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["mgk"] = MGKForSequenceClassification.__name__
# Labels of the same shape, without being what AutoModelForSequenceClassification loads.
auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES["mgk"] = MGKForSequencePairClassification.__name__
# The tests ask this table whether a model reads images; without torchvision transformers has none.
if not transformers.utils.is_torchvision_available():
    feature_extraction.IMAGE_PROCESSOR_MAPPING = {}


class Tester(CausalLMModelTester):
    """Shapes that transformers tests every text model with, and a configuration with one preset."""

    base_model_class = MGKModel
    config_class = MGKConfig
    preset: str

    def get_config(self, **changes: Any) -> MGKConfig:
        return MGKConfig(
            attention=self.preset, vocab_size=self.vocab_size, hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers, num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads, intermediate_size=self.intermediate_size,
            hidden_act=self.hidden_act, max_position_embeddings=self.max_position_embeddings,
            pad_token_id=self.pad_token_id, bos_token_id=self.bos_token_id, eos_token_id=self.eos_token_id, **changes,
        )  # fmt: skip


class DecoderTester(Tester):
    causal_lm_class = MGKForCausalLM

    def get_config(self) -> MGKConfig:
        return super().get_config(is_decoder=True, tie_word_embeddings=self.tie_word_embeddings)


class EncoderTester(Tester):
    """The classifiers, for which the tests ask nothing of generation."""

    causal_lm_class = None
    sequence_classification_class = MGKForSequenceClassification
    _required_attributes = ("base_model_class", "config_class")

    @property
    def all_model_classes(self) -> list[type]:
        return [MGKModel, MGKForSequenceClassification, MGKForSequencePairClassification]


class Seq2SeqTester(Tester):
    """Source and target share a table, since the tests embed both with that of ``get_input_embeddings``."""

    base_model_class = MGKSeq2SeqModel
    causal_lm_class = None
    _required_attributes = ("base_model_class", "config_class")

    def get_config(self) -> MGKConfig:
        return super().get_config(is_encoder_decoder=True, decoder_start_token_id=self.bos_token_id)

    def prepare_config_and_inputs_for_common(self) -> tuple[MGKConfig, dict[str, Tensor]]:
        config, source, _, mask, *_ = self.prepare_config_and_inputs()
        # Neither padding nor the end of a text inside it: the tests append tokens and masks to both.
        first = max(self.pad_token_id, self.bos_token_id, self.eos_token_id) + 1
        target = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp(min=first)
        inputs = {"input_ids": source.clamp(min=first), "attention_mask": mask, "decoder_input_ids": target}
        return config, {**inputs, "decoder_attention_mask": torch.ones_like(target)}


class OurPipelines(PipelineTesterMixin):
    """Pipelines of the small models that the command has saved, by preset, instead of models of the Hub."""

    def run_pipeline_test(self, task: str, repo_name: str, *args: Any, **kwargs: Any) -> None:
        preset = self.model_tester_class.preset
        super().run_pipeline_test(task, os.path.join(preset, repo_name), *args, **kwargs)


class OurCache(GenerationTesterMixin):
    """What the cache keeps of the tokens, the same whatever the tests ask of generation."""

    def _get_attention_shape(
        self, batch_size: int, seq_length: int | None, config: MGKConfig
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        preset, width = PRESETS[config.attention], config.head_dim
        heads = (batch_size, config.num_key_value_heads)
        key_width = width if preset.keys == "shifted" else width * preset.num_components
        # Without a length it is about cross-attention, which keeps keys whatever the preset.
        if seq_length is None:
            return (*heads, key_width), (*heads, width)
        if preset.feature_map is not None:
            # One state: the map `elu` has as many features as a head is wide, and a column counts.
            return (*heads, width, width + 1), (batch_size, 0)
        return (*heads, seq_length, key_width), (*heads, seq_length, width)


class OurModels(OurPipelines, ModelTesterMixin):
    """What :class:`CausalLMModelTest` does for decoders, for models that are none."""

    def setUp(self) -> None:
        self.model_tester = self.model_tester_class(self)
        self.config_tester = ConfigTester(self, config_class=MGKConfig)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class Decoder(OurPipelines, OurCache, CausalLMModelTest):
    model_tester_class = DecoderTester
    all_model_classes = (MGKModel, MGKForCausalLM)
    pipeline_model_mapping = {"feature-extraction": MGKModel, "text-generation": MGKForCausalLM}  # noqa: RUF012
    _torch_compile_train_cls = MGKForCausalLM


class Encoder(OurModels):
    model_tester_class = EncoderTester
    all_model_classes = (MGKModel, MGKForSequenceClassification, MGKForSequencePairClassification)
    pipeline_model_mapping = {  # noqa: RUF012
        "feature-extraction": MGKModel,
        "text-classification": MGKForSequenceClassification,
        "zero-shot": MGKForSequenceClassification,
    }
    test_sequence_classification_model = CausalLMModelTest.test_sequence_classification_model
    test_sequence_classification_model_for_single_label = (
        CausalLMModelTest.test_sequence_classification_model_for_single_label
    )
    test_sequence_classification_model_for_multi_label = (
        CausalLMModelTest.test_sequence_classification_model_for_multi_label
    )

    def _prepare_for_class(self, inputs: dict[str, Any], model: type, return_labels: bool = False) -> dict[str, Any]:
        inputs = super()._prepare_for_class(inputs, model, return_labels=return_labels)
        if model is MGKForSequencePairClassification:
            # The same tokens backwards: of the same shape, whatever a test has made of the first sequence.
            for name in ("input_ids", "attention_mask", "inputs_embeds"):
                if inputs.get(name) is not None:
                    inputs[f"pair_{name}"] = inputs[name].flip(1)
        return inputs


class Seq2Seq(OurCache, OurModels):
    model_tester_class = Seq2SeqTester
    all_model_classes = (MGKSeq2SeqModel, MGKForSeq2SeqLM)
    pipeline_model_mapping = {}  # noqa: RUF012
    is_encoder_decoder = True


KINDS = {"decoder": Decoder, "encoder": Encoder, "seq2seq": Seq2Seq}


def suite_of(model: str, preset: str) -> type:
    kind = KINDS[model]
    tester = type(kind.model_tester_class.__name__, (kind.model_tester_class,), {"preset": preset})
    return type(f"{model}_{preset}", (kind, unittest.TestCase), {"model_tester_class": tester})


# pytest finds every TestCase of the module.
globals().update(
    {
        f"{model}_{preset}": suite_of(model, preset)
        for model in os.environ["MGK_SUITE_MODELS"].split(",")
        for preset in os.environ["MGK_SUITE_PRESETS"].split(",")
    }
)
