"""Generation end to end on the kernel for a step: grouped heads, padded prompts, both caches."""

import pytest
import torch
from model_cases import make_inputs, make_model
from triton_cases import HALF

from mgk.ops.triton import launch


@pytest.mark.parametrize("attention", ["smgk", "mgk", "smgk-hard"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_tokens_are_those_of_the_reference(attention, cache, monkeypatch):
    """P16: a prompt of a few tokens and every step after it, in half precision."""
    names, start = set(), launch._start
    monkeypatch.setattr(
        launch, "_start", lambda kernel, *args: (names.add(kernel.fn.__name__), start(kernel, *args))[1]
    )
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    inputs = make_inputs("modern", padding_side="left", tokens=7)
    tokens = {}
    for implementation, dtype in (("eager", torch.float32), ("triton", HALF)):
        model = make_model("modern", attention, dtype=dtype, num_key_value_heads=2)
        model.set_attn_implementation(implementation)
        names.clear()
        tokens[implementation] = model.generate(**inputs, max_new_tokens=5, do_sample=False, **options)
    assert names == {"decode_split", "decode_merge"}
    assert torch.equal(tokens["triton"], tokens["eager"])
