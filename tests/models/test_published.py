"""Checkpoints with the layout of the released code: what is imported computes what they compute."""

import os
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from published_cases import CLUSTERS, ArenaClassifier, LanguageModel
from safetensors.torch import save_file
from torch import nn

from mgk.models import (
    MGKForCausalLM,
    MGKForSequenceClassification,
    MGKForSequencePairClassification,
    import_checkpoint,
    pickled_tensors,
)

EXACT = {"rtol": 0.0, "atol": 1e-10}
ARENA = ["softmax", "mgk", "smgk", "mgk-hard", "smgk-hard"]
# Their name of a mode, and the preset that it is.
LANGUAGE = {
    "softmax": "softmax", "hard": "smgk-hard", "hard2keys": "mgk-hard", "rbf": "smgk", "rbf2keys": "mgk",
    "soft": "smgk",
}  # fmt: skip


def randomised(model, seed=0):
    """In fp64, with weights that let every part count."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "pi" not in name.rpartition(".")[2]:
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return model.double().eval()


def saved(model, path):
    """Its state as safetensors, for which no process is needed. Names of one tensor are all there."""
    save_file({name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}, path)
    return path


def arena_inputs(*, pair):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 29, (3, 11), generator=generator)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:], mask[2, 3:] = 0, 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if pair:
        inputs |= {"pair_input_ids": tokens.flip(0)[:, :9], "pair_attention_mask": mask[:, :9]}
    return inputs


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", ARENA)
def test_a_classifier_of_long_range_arena(kind, pair, tmp_path):
    """Padded by different lengths, and by none of them to what theirs pads to."""
    theirs = randomised(ArenaClassifier([kind] * 2, pair=pair))
    ours = import_checkpoint(saved(theirs, tmp_path / "a.safetensors"), num_attention_heads=2)
    assert type(ours) is (MGKForSequencePairClassification if pair else MGKForSequenceClassification)
    assert ours.config.attention == kind
    assert ours.dtype == torch.float64
    assert not ours.training
    inputs = arena_inputs(pair=pair)
    with torch.no_grad():
        expected, got = theirs(**inputs), ours(**inputs).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, **EXACT)
    # Every part of the mixture matters here: none could be wrong and go unseen.
    for name, parameter in ours.named_parameters():
        if name.endswith(("keys.shift", "prior.logits", "k_proj.weight")):
            changed = parameter.detach().clone()
            with torch.no_grad():
                parameter.copy_(parameter.flip(-1 if "prior" in name else 0))
                assert (ours(**inputs).logits - expected).abs().max() > 1e-6, name
                parameter.copy_(changed)


def test_a_packed_batch_is_divided_by_the_same_length(tmp_path):
    model = import_checkpoint(saved(randomised(ArenaClassifier(["smgk"])), tmp_path / "a.safetensors"), length=40)
    assert model.config.pooling_length == 40
    inputs = arena_inputs(pair=False)
    tokens = inputs["input_ids"][inputs["attention_mask"].bool()][None]
    with torch.no_grad():
        packed = model(tokens, cu_seq_lens_q=torch.tensor([0, 11, 18, 21], dtype=torch.int32)).logits
        torch.testing.assert_close(packed, model(**inputs).logits, **EXACT)


@pytest.mark.filterwarnings("ignore:the released language models")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", LANGUAGE)
def test_a_language_model(mode, tied, tmp_path):
    """Log-probabilities of every word at every position, in windows of different lengths."""
    theirs = randomised(LanguageModel(mode, tied=tied))
    path = saved(theirs, tmp_path / "a.safetensors")
    ours = import_checkpoint(path, num_attention_heads=2, adaptive_cutoffs=CLUSTERS)
    assert type(ours) is MGKForCausalLM
    assert ours.config.attention == LANGUAGE[mode]
    assert ours.config.tie_word_embeddings == tied
    tokens = torch.randint(0, 23, (3, 16), generator=torch.Generator().manual_seed(1))
    for length in (16, 9, 1):
        with torch.no_grad():
            expected, got = theirs(tokens[:, :length]), ours(tokens[:, :length]).logits
        torch.testing.assert_close(got, expected, **EXACT)
    # The loss takes another way through the clusters.
    with torch.no_grad():
        loss = ours(tokens, labels=tokens).loss
        words = theirs(tokens)[:, :-1].gather(-1, tokens[:, 1:, None])
    torch.testing.assert_close(loss, -words.mean(), **EXACT)


def test_the_sum_of_soft_language_models_is_not_quite_theirs(tmp_path):
    """They add 1e-6 to it: near where keys are near, and said so."""
    theirs = randomised(LanguageModel("rbf2keys", eps=1e-6))
    with torch.no_grad():
        for layer in theirs.layers:
            layer.dec_attn.q_net.weight.mul_(0.1)
            layer.dec_attn.kv_net.weight.mul_(0.1)
    path = saved(theirs, tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match="add 1e-6 to the sum of the weights, which is not done here"):
        ours = import_checkpoint(path, num_attention_heads=2, adaptive_cutoffs=CLUSTERS)
    tokens = torch.randint(0, 23, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (ours(tokens).logits - theirs(tokens)).abs().max()
    assert 1e-9 < difference < 1e-4


def test_what_is_imported_is_saved_trained_and_generates(tmp_path):
    path = saved(randomised(LanguageModel("hard")), tmp_path / "a.safetensors")
    model = import_checkpoint(path, adaptive_cutoffs=CLUSTERS, length=32)
    assert (model.config.num_attention_heads, model.config.max_position_embeddings) == (2, 32)
    model.save_pretrained(tmp_path / "model")
    again = MGKForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    tokens = torch.randint(0, 23, (2, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    # Every new token moves the positions of all: without a cache that is so, and with one it is refused.
    written = again.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = tokens
    for _ in range(4):
        with torch.no_grad():
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(written, expected)
    with pytest.raises(ValueError, match="counted from the end change with every token, so nothing can be cached"):
        again.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=True)
    again.train()(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


def test_positions_from_the_end_know_padding_and_packing(tmp_path):
    path = saved(randomised(LanguageModel("hard")), tmp_path / "a.safetensors")
    model = import_checkpoint(path, adaptive_cutoffs=CLUSTERS)
    tokens = torch.randint(0, 23, (1, 11), generator=torch.Generator().manual_seed(1))
    parts = tokens.split([4, 7], dim=1)
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in parts], dim=1)
        packed = model(tokens, cu_seq_lens_q=torch.tensor([0, 4, 11], dtype=torch.int32)).logits
        torch.testing.assert_close(packed, alone, **EXACT)
        for padding in ((3, 0), (0, 3)):
            padded = nn.functional.pad(parts[0], padding)
            mask = nn.functional.pad(torch.ones_like(parts[0]), padding)
            got = model(padded, attention_mask=mask).logits[mask.bool()]
            torch.testing.assert_close(got, alone[0, :4], **EXACT)


def test_a_prior_outside_of_their_bounds(tmp_path):
    """They clamp to [0, 1] whenever they read it."""
    theirs = randomised(ArenaClassifier(["smgk", "smgk"]))
    with torch.no_grad():
        theirs.model.transformer_0.mha.attn.pi.copy_(torch.tensor([-0.2, 0.7]))
        theirs.model.transformer_1.mha.attn.pi.copy_(torch.tensor([1.4, 0.7]))
    ours = import_checkpoint(saved(theirs, tmp_path / "a.safetensors"))
    inputs = arena_inputs(pair=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs), **EXACT)
    with torch.no_grad():
        theirs.model.transformer_0.mha.attn.pi.copy_(torch.tensor([-0.2, -0.1]))
    with pytest.raises(ValueError, match="must have a prior above 0 in every head"):
        import_checkpoint(saved(theirs, tmp_path / "a.safetensors"))


def changed(model, **tensors):
    """Its state with tensors added, or taken away where they are ``None``."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    return state


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (lambda: ArenaClassifier(["mgk"]).state_dict(), {}, "num_attention_heads must be given, since the weights"),
        (lambda: ArenaClassifier(["mgk"]).state_dict(), {"num_attention_heads": 5}, "heads, 12, got 5"),
        (
            lambda: ArenaClassifier(["smgk"]).state_dict(), {"num_attention_heads": 3},
            "num_attention_heads must be 2, as the weights have it, got 3",
        ),
        (
            lambda: ArenaClassifier(["smgk", "softmax"]).state_dict(), {"num_attention_heads": 2},
            "one kind of attention in all layers, got smgk, softmax",
        ),
        (
            lambda: changed(ArenaClassifier(["smgk"]), model__cls_embed=torch.zeros(1, 1, 12)), {},
            r"a model that is known here, got model\.cls_embed",
        ),
        (
            lambda: changed(ArenaClassifier(["smgk"]), model__norm__bias=None), {},
            r"must hold model\.norm\.bias, got none",
        ),
        (
            lambda: changed(ArenaClassifier(["softmax"]), model__transformer_0__mha__attn__mu=torch.zeros(2, 2, 6)),
            {"num_attention_heads": 2}, "must not hold linear attention",
        ),
        (
            lambda: changed(LanguageModel("hard"), layers__0__dec_attn__qkv_net__weight=torch.zeros(3)), {},
            "must not hold linear attention",
        ),
        (
            lambda: changed(LanguageModel("soft"), layers__0__dec_attn__pi=torch.rand(2, 1, 1, 16)),
            {"adaptive_cutoffs": CLUSTERS},
            "priors that are the same at all positions, got ones that differ",
        ),
        (lambda: LanguageModel("hard").state_dict(), {}, "adaptive_cutoffs must be 2, as many as there are clusters"),
        (
            lambda: ArenaClassifier(["smgk"]).state_dict(), {"adaptive_cutoffs": [3]},
            r"adaptive_cutoffs are for language models, got \[3\]",
        ),
        (lambda: {"bert.weight": torch.zeros(3)}, {}, r"must be a classifier or a language model .* got bert\.weight"),
        (
            lambda: {"model.embeddings.word_embeddings.weight": torch.zeros(3, 4)}, {},
            r"must hold model\.embeddings\.position_embeddings\.weight, got none",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(state, options, message, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({name: tensor.clone().contiguous() for name, tensor in state().items()}, path)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(path, **options)


# Files of torch.save, each read by a process


class Malicious:
    """Runs a command where it is unpickled the usual way."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_file_that_could_run_code_is_refused_and_runs_none(tmp_path):
    proof, path = tmp_path / "proof", tmp_path / "a.pt"
    torch.save({"model_state_dict": {"x": torch.zeros(2)}, "extra": Malicious(proof)}, path)
    with pytest.raises(ValueError, match=r"must hold tensors by name and nothing that can run code, got Unpickling"):
        import_checkpoint(path)
    assert not proof.exists()


def test_a_process_of_its_own_reads_a_whole_module(tmp_path, monkeypatch):
    """Their language models are saved so. No class of theirs is imported, here or there; nothing is unpickled here."""
    theirs = randomised(LanguageModel("hard"))
    # As if from the module that theirs come from.
    module = type(sys)("mem_transformer")
    for each in {type(part) for part in theirs.modules() if type(part).__module__ == "published_cases"}:
        monkeypatch.setattr(each, "__module__", "mem_transformer")
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "mem_transformer", module)
    torch.save(theirs, tmp_path / "model.pt")
    monkeypatch.delitem(sys.modules, "mem_transformer")
    monkeypatch.setattr(torch, "load", None)
    tensors = pickled_tensors.read_tensors(tmp_path / "model.pt")
    assert tensors.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in tensors.items())
    ours = import_checkpoint(tmp_path / "model.pt", adaptive_cutoffs=CLUSTERS)
    assert ours.config.attention == "smgk-hard"


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"a checkpoint must be a file, got .*, where none is"):
        import_checkpoint(tmp_path / "absent.pt")
    (tmp_path / "a.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="must hold tensors by name and nothing that can run code, got "):
        import_checkpoint(tmp_path / "a.pt")


def test_mgk_import(tmp_path, run_command):
    """From the file that their script writes to a folder that transformers loads, with a card that says where from."""
    theirs = randomised(ArenaClassifier(["smgk", "smgk"])).float()
    torch.save({"model_state_dict": theirs.state_dict()}, tmp_path / "output.model")
    printed = run_command("import", tmp_path / "output.model", "--to", tmp_path / "model")
    assert printed.out.startswith("MGKForSequenceClassification, smgk, ")
    model = MGKForSequenceClassification.from_pretrained(tmp_path / "model")
    inputs = arena_inputs(pair=False)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, theirs(**inputs), rtol=1e-5, atol=1e-5)
    assert "`output.model`, SHA-256" in ModelCard.load(tmp_path / "model" / "README.md").text
    again = run_command("import", tmp_path / "output.model", "--to", tmp_path / "model", code=1)
    assert "--to must be a new or empty folder" in again.err
    wrong = run_command("import", tmp_path / "output.model", "--to", tmp_path / "b", "--cutoffs", "a,b", code=1)
    assert "--cutoffs must look like 20000,40000,200000, got 'a,b'" in wrong.err
