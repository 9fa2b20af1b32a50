"""Generation end to end on the kernel for a step: grouped heads, padded prompts, both caches."""

import pytest
import torch
from model_cases import make_inputs, make_model
from triton_cases import HALF

from mgk.ops.triton import launch


@pytest.mark.parametrize("attention", ["smgk", "mgk", "smgk-hard"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_tokens_are_the_likeliest_of_the_reference(attention, cache, monkeypatch):
    """P16: a prompt of a few tokens and every step after it, in half precision."""
    names, start = set(), launch._start
    monkeypatch.setattr(
        launch, "_start", lambda kernel, *args: (names.add(kernel.fn.__name__), start(kernel, *args))[1]
    )
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    inputs = make_inputs("modern", padding_side="left", tokens=7)
    model = make_model("modern", attention, dtype=HALF, num_key_value_heads=2)
    model.set_attn_implementation("triton")
    tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False, **options)
    assert names == {"decode_split", "decode_merge"}
    # Two tokens may be almost equally likely: none that was taken is less likely than another by more than rounding.
    reference = make_model("modern", attention, dtype=torch.float32, num_key_value_heads=2)
    reference.set_attn_implementation("eager")
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(tokens[:, 7:])], dim=1)
    logits = reference(tokens, attention_mask=mask).logits[:, 6:-1].log_softmax(-1)
    taken = logits.gather(-1, tokens[:, 7:, None])[..., 0]
    assert tokens.shape == (3, 12)
    assert (logits.amax(-1) - taken <= 0.05).all()
