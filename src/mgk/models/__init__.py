"""Hugging Face models on mixture attention. ``save_pretrained``, ``generate``, ``Trainer`` and PEFT work as usual."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from mgk.models.adaptive_softmax import AdaptiveSoftmax, cluster_rows
from mgk.models.architectures import ARCHITECTURES, architecture
from mgk.models.causal_lm import MGKForCausalLM
from mgk.models.classifier import MGKForSequenceClassification
from mgk.models.configuration import MGKConfig
from mgk.models.matcher import MGKForSequencePairClassification
from mgk.models.model import MGKModel
from mgk.models.pretrained import MGKPreTrainedModel
from mgk.models.published import import_checkpoint
from mgk.models.seq2seq import MGKForSeq2SeqLM, MGKSeq2SeqModel
from mgk.models.tokenizer import check_tokenizer, fingerprint

AutoConfig.register("mgk", MGKConfig, exist_ok=True)
AutoModel.register(MGKConfig, MGKModel, exist_ok=True)
AutoModelForSequenceClassification.register(MGKConfig, MGKForSequenceClassification, exist_ok=True)
AutoModelForCausalLM.register(MGKConfig, MGKForCausalLM, exist_ok=True)
AutoModelForSeq2SeqLM.register(MGKConfig, MGKForSeq2SeqLM, exist_ok=True)

__all__ = [
    "ARCHITECTURES",
    "AdaptiveSoftmax",
    "MGKConfig",
    "MGKForCausalLM",
    "MGKForSeq2SeqLM",
    "MGKForSequenceClassification",
    "MGKForSequencePairClassification",
    "MGKModel",
    "MGKPreTrainedModel",
    "MGKSeq2SeqModel",
    "architecture",
    "check_tokenizer",
    "cluster_rows",
    "fingerprint",
    "import_checkpoint",
]
