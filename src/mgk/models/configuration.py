"""The configuration of every model of the library."""

# No postponed annotations here: transformers checks every value against the type of its field.
import copy
import difflib
import functools
import math
import os
from dataclasses import fields
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mgk.models.remote_code import auto_map, write_module
from mgk.nn.presets import LINEAR_PRESETS, PRESETS, SOFTMAX_PRESETS
from mgk.ops.feature_maps import NAMES as FEATURE_MAPS

# Keys that transformers reads, or wrote in earlier versions, without a field. They are passed to PreTrainedConfig.
KEYS_OF_TRANSFORMERS = {
    "add_cross_attention", "attn_implementation", "auto_map", "bad_words_ids", "cls_token_id",
    "cross_attention_hidden_size", "custom_pipelines", "early_stopping", "experts_implementation", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "is_remote_code", "mask_token_id", "max_length", "model_type",
    "name_or_path", "num_labels", "output_attentions", "partial_rotary_factor", "per_layer_config", "prefix",
    "pruned_heads", "quantization_config", "rope_parameters", "rope_scaling", "rope_theta", "sep_token_id",
    "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_weights", "use_bfloat16",
}  # fmt: skip

# Names that other libraries, or `mgk.nn`, use for our fields.
OTHER_NAMES = {
    "d_model": "hidden_size", "embed_dim": "hidden_size", "ffn_dim": "intermediate_size",
    "n_heads": "num_attention_heads", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers", "num_layers": "num_hidden_layers", "num_classes": "num_labels",
}  # fmt: skip


@strict
class MGKConfig(PreTrainedConfig):
    """The configuration of every model. :func:`mgk.models.architecture` has the paper's models by name.

    All models share this class, and each ignores the fields that it does not use (a classifier has no
    ``adaptive_cutoffs``). Unknown keys are refused, with the nearest name as a hint; settings of generation are
    accepted and dropped, as in every configuration of transformers.
    """

    model_type = "mgk"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "layer_norm_eps": "norm_eps",
        "layer_norm_epsilon": "norm_eps",
        "rms_norm_eps": "norm_eps",
        "norm_epsilon": "norm_eps",
    }

    attention: str = "smgk"
    """The attention of every layer, one of :data:`mgk.nn.PRESETS`. The priors of ``mgk-em`` and ``smgk-em`` change only
    when :func:`mgk.update_priors` is called, after each optimiser step."""
    num_components: int | None = None
    """Keys per position; ``None`` takes the number of the preset."""
    feature_map: str | None = None
    """Feature map of linear attention (``linear``, ``mlk``, ``smlk``): ``elu``, ``relu``, ``dpfp`` or ``favor``;
    ``None`` takes that of the preset. Linear attention has no attention dropout, because it never forms the weights."""
    normalization: Literal["sum", "length"] = "sum"
    """Divisor of linear attention: the sum of the weights, or the square root of the number of keys, as in the paper's
    Long Range Arena experiments."""
    qk_norm: bool = False
    """Normalise queries and keys before the similarity."""
    learn_variance: bool = False
    """Learn a variance per key/value head and component."""
    variance_scale: int | float | list[int | float] | tuple[int | float, ...] = 1.0
    """Variance divided by ``sqrt(head_dim)``, one number or one per component."""
    shift_init_std: int | float = 1.0
    """Standard deviation of the initial shifts."""
    shift_init: Literal["normal", "first-zero"] = "normal"
    """Draw all shifts, or start those of the first component at 0, as in the paper's released code."""
    prior_momentum: int | float = 0.0
    """How much of the old prior an EM update keeps."""
    prior: Literal["learned", "uniform"] | None = None
    """Whether the prior of the components is learned, or stays uniform; ``None`` is what the preset says."""
    query_bias_init_std: int | float | None = None
    """Standard deviation of the initial biases of the query projection; ``None``: they start as all biases do. One of
    1 gives every query the constant that a shift from N(0, 1) gives every key."""

    vocab_size: int = 32000
    """Size of the vocabulary; in translation, of the target's."""
    source_vocab_size: int | None = None
    """In translation, size of the source's own vocabulary; ``None`` if source and target share one, and with
    ``tie_word_embeddings`` its embedding table as well."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 4
    """Number of layers; in translation, of the encoder."""
    decoder_layers: int | None = None
    """In translation, number of layers of the decoder; ``None`` is ``num_hidden_layers``."""
    num_attention_heads: int = 4
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key/value heads, a divisor of ``num_attention_heads``; ``None`` is equal to it, 1 is multi-query."""
    head_dim: int | None = None
    """Width of a head; ``None`` is ``hidden_size / num_attention_heads``. Keep it fixed to halve only the heads."""
    intermediate_size: int = 1024
    """Width of the feed-forward network."""
    hidden_act: str = "gelu"
    """Activation of the feed-forward network, a name that transformers knows."""
    gated_mlp: bool = False
    """Multiply the activation by a second projection (SwiGLU with ``hidden_act="silu"``)."""
    attention_bias: bool = True
    """Biases in the projections of the attention."""
    mlp_bias: bool = True
    """Biases in the feed-forward network."""
    norm: Literal["layer", "rms"] = "layer"
    """``LayerNorm`` or ``RMSNorm``."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Norm before each sublayer and once at the end, or after each residual sum."""
    norm_eps: int | float = 1e-5
    """Added to the variance inside the norms."""

    positions: Literal["learned", "sinusoidal", "rotary", "none"] = "rotary"
    """Kind of position encoding. Only with ``"rotary"`` there is also ``rope_parameters``, the frequencies and their
    scaling in the format of transformers."""
    max_position_embeddings: int = 2048
    """Length of the table of learned positions; for other positions, the length that the model is meant for."""
    positions_from: Literal["start", "end"] = "start"
    """Count learned or sinusoidal positions from the first token, or back from the last, as the released language
    models do. In the second case the next token moves all positions, so nothing can be cached."""
    scale_embeddings: bool = False
    """Multiply token embeddings by ``sqrt(hidden_size)``."""

    dropout: int | float = 0.0
    """Dropout after embeddings, attention and feed-forward network."""
    attention_dropout: int | float = 0.0
    """Dropout on attention weights."""
    activation_dropout: int | float = 0.0
    """Dropout inside the feed-forward network."""

    classifier_size: int = 128
    """Hidden width of the classification head."""
    pooling: Literal["mean", "mean-over-length"] = "mean"
    """Input of the classification head: the mean of the last states over the tokens that are not padding, or their sum
    divided by ``pooling_length``, as in the published Long Range Arena code."""
    pooling_length: int | None = None
    """The length to which the published code pads every sequence; ``None`` is ``max_position_embeddings``. Only with
    ``pooling="mean-over-length"``."""
    adaptive_cutoffs: list[int] | None = None
    """Ends of the clusters of an adaptive softmax, in tokens sorted by frequency; ``None`` is a plain softmax."""
    tie_word_embeddings: bool = True
    """Share one table between input embeddings and output logits."""

    initialization: Literal["normal", "torch", "xavier"] = "normal"
    """Initialisation of the projections: normal with ``initializer_range``, torch's default, or Xavier uniform."""
    initializer_range: int | float = 0.02
    """Standard deviation of normal weights and embeddings (Xavier: embeddings have ``hidden_size ** -0.5``)."""

    use_cache: bool = True
    """Keep keys and values while generating."""
    is_decoder: bool = False
    """Causal self-attention. :class:`mgk.models.MGKForCausalLM` sets it."""
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    tokenizer_sha256: str | None = None
    """Fingerprint of the tokenizer that the weights belong to: :func:`mgk.models.fingerprint`."""
    source_tokenizer_sha256: str | None = None
    """Fingerprint of the source's tokenizer, if the source has its own vocabulary."""

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        if isinstance(self.variance_scale, tuple):
            self.variance_scale = list(self.variance_scale)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads != 0:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads, or head_dim given, "
                    f"got {self.hidden_size} and {self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.is_encoder_decoder and self.decoder_layers is None:
            self.decoder_layers = self.num_hidden_layers
        if self.positions == "rotary":
            self.rope_parameters: dict[str, Any] | None = kwargs.pop("rope_parameters", None)
        super().__post_init__(**kwargs)

    def _refuse_unknown(self, keys: dict[str, Any]) -> None:
        """Refuse keys that resemble one of ours, and all others that transformers cannot have written."""
        # A file names the version that wrote it. That version may know keys that we do not, but they hardly resemble
        # ours.
        from_file = self.transformers_version is not None
        own = {field.name for field in fields(self)} | {"num_labels"}
        for key in sorted(keys.keys() - self.attribute_map.keys() - _keys_of_transformers()):
            nearest = _nearest(key, own, cutoff=0.85 if from_file else 0.75)
            if nearest is not None and not key.startswith("_"):
                raise ValueError(f"MGKConfig has no key {key!r}: did you mean {nearest!r}?")
            if not from_file and not key.startswith("_"):
                raise ValueError(f"MGKConfig has no key {key!r}: see the fields of mgk.models.MGKConfig")
        if isinstance(keys.get("num_labels"), bool):
            raise ValueError(f"num_labels must be a number, got {keys['num_labels']}")

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save as in transformers, with the module that ``trust_remote_code=True`` needs to import ``mgk.models``."""
        self.auto_map = auto_map(self.is_encoder_decoder, self.architectures)
        write_module(save_directory)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing, because :meth:`save_pretrained` writes what loading needs."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Load as in transformers, but refuse a misspelt change instead of dropping it."""
        if not kwargs.get("return_unused_kwargs"):
            own = {field.name for field in fields(cls)}
            for key in sorted(kwargs.keys() - own - cls.attribute_map.keys() - _keys_of_transformers()):
                nearest = _nearest(key, own, cutoff=0.75)
                if nearest is not None:
                    raise ValueError(f"MGKConfig has no key {key!r}: did you mean {nearest!r}?")
        return super().from_dict(config_dict, **kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Return the configuration for which transformers builds caches, that of the decoder if it asks for that."""
        if not decoder or encoder or self.decoder_layers in (None, self.num_hidden_layers):
            return self
        config = copy.deepcopy(self)
        config.num_hidden_layers = self.decoder_layers
        return config

    def validate_architecture(self) -> None:
        """Check the fields. transformers calls this after construction."""
        if self.attention not in PRESETS:
            # The softmax presets come first, because there are more of them to mistype.
            nearest = [
                match
                for family in (SOFTMAX_PRESETS, LINEAR_PRESETS)
                for match in difflib.get_close_matches(self.attention, family, n=1)
            ]
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise ValueError(f"attention must be one of {', '.join(PRESETS)}, got {self.attention!r}{hint}")
        if self.attention in LINEAR_PRESETS:
            if self.feature_map is not None and self.feature_map not in FEATURE_MAPS:
                raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {self.feature_map!r}")
            if self.learn_variance:
                raise ValueError(f"learn_variance must be false with attention={self.attention!r}, got true")
        elif self.feature_map is not None or self.normalization != "sum":
            raise ValueError(
                f"feature_map and normalization must be left out with attention={self.attention!r}, "
                f"got {self.feature_map!r} and {self.normalization!r}: they belong to {', '.join(LINEAR_PRESETS)}"
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be an activation that transformers knows, got {self.hidden_act!r}")
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "max_position_embeddings", "classifier_size", "num_components", "decoder_layers",
            "source_vocab_size", "pooling_length",
        ):  # fmt: skip
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if self.pooling_length is not None and self.pooling == "mean":
            raise ValueError(
                f"pooling_length must be left out with pooling='mean', got {self.pooling_length}: "
                f"it belongs to 'mean-over-length'"
            )
        if self.num_labels is not None and self.num_labels < 1:
            raise ValueError(f"num_labels must be at least 1, got {self.num_labels}")
        assert self.num_key_value_heads is not None
        assert self.head_dim is not None
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout", "prior_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        for name in ("norm_eps", "initializer_range", "shift_init_std", "query_bias_init_std"):
            if getattr(self, name) is not None and not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if self.query_bias_init_std is not None and not self.attention_bias:
            raise ValueError(
                f"query_bias_init_std must be left out with attention_bias=False, got {self.query_bias_init_std}"
            )
        if self.positions == "rotary":
            if self.head_dim % 2 != 0:
                raise ValueError(f"positions='rotary' needs an even head_dim, got {self.head_dim}")
            rope = self.rope_parameters or {}
            kinds = ("default", *ROPE_INIT_FUNCTIONS)
            if rope.get("rope_type", "default") not in kinds:
                raise ValueError(f"rope_type must be one of {', '.join(kinds)}, got {rope['rope_type']!r}")
            if rope.get("partial_rotary_factor", 1.0) != 1.0:
                raise ValueError(f"partial_rotary_factor must be 1, got {rope['partial_rotary_factor']}")
        if self.positions == "sinusoidal" and self.hidden_size % 2 != 0:
            raise ValueError(f"positions='sinusoidal' needs an even hidden_size, got {self.hidden_size}")
        if self.positions_from == "end":
            kind = "translation" if self.is_encoder_decoder else f"{self.positions} positions"
            if kind not in ("learned positions", "sinusoidal positions"):
                raise ValueError(f"positions_from='end' needs learned or sinusoidal positions of one text, got {kind}")
        cutoffs = self.adaptive_cutoffs
        if cutoffs is not None and (
            len(cutoffs) == 0 or [0, *cutoffs, self.vocab_size] != sorted({0, *cutoffs, self.vocab_size})
        ):
            raise ValueError(
                f"adaptive_cutoffs must grow from above 0 to below vocab_size={self.vocab_size}, got {cutoffs}"
            )


def _nearest(key: str, names: set[str], cutoff: float) -> str | None:
    """Return the name that was probably meant, or ``None``."""
    if key in OTHER_NAMES:
        return OTHER_NAMES[key]
    return next(iter(difflib.get_close_matches(key, names, n=1, cutoff=cutoff)), None)


@functools.cache
def _keys_of_transformers() -> frozenset[str]:
    """Keys that any configuration of transformers may hold, and the settings of generation, which it drops."""
    return frozenset(KEYS_OF_TRANSFORMERS | vars(PreTrainedConfig()).keys() | vars(GenerationConfig()).keys())
