"""The modes of generation that a model supports."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, GenerationMixin


class MGKGenerationMixin(GenerationMixin):
    """``generate`` without the modes in which a model with linear attention would have to take back tokens.

    transformers refuses assisted decoding and prompt lookup for stateful models, but does not check the assistant,
    which has to take back the tokens that the model did not accept.
    """

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        assistant = generation_mode_kwargs.get("assistant_model")
        # Any model may use one of ours as its assistant, which `is_assistant` tells us.
        for model in (assistant, self if generation_config.is_assistant else None):
            if model is not None and getattr(model, "_is_stateful", False):
                raise ValueError(
                    "the assistant of assisted generation must be able to take tokens back, "
                    f"got {type(model).__name__}, a stateful model"
                )
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
