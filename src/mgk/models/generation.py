"""Which ways to generate a model has."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, GenerationMixin


class MGKGenerationMixin(GenerationMixin):
    """``generate``, without the ways in which a model with linear attention would have to take tokens back.

    transformers refuses assisted decoding and prompt lookup for models that it calls stateful. It does not look at the
    assistant, which has to take back what the model did not accept.
    """

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        assistant = generation_mode_kwargs.get("assistant_model")
        # An assistant of ours is asked by a model of any kind: `is_assistant` is how it is told.
        for model in (assistant, self if generation_config.is_assistant else None):
            if model is not None and getattr(model, "_is_stateful", False):
                raise ValueError(
                    "the assistant of assisted generation must be able to take tokens back, "
                    f"got {type(model).__name__}, a stateful model"
                )
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
