"""The command `mgk`, as a user runs it."""

import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgk.cli import app, main
from mgk.models import MGKForCausalLM, MGKForSeq2SeqLM, MGKForSequenceClassification, architecture, fingerprint

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 64, "num_hidden_layers": 2}


def byte_tokenizer(extra=()):
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *alphabet, *extra])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A language model and a translator with their tokenizer, untrained."""
    tokenizer = byte_tokenizer()
    folders = {}
    special = {"vocab_size": 258, "pad_token_id": 0, "eos_token_id": 1, "tokenizer_sha256": fingerprint(tokenizer)}
    for name, kind, shape, changes in (
        ("writer", MGKForCausalLM, "modern", {}),
        ("translator", MGKForSeq2SeqLM, "iwslt14",
         {"source_vocab_size": None, "decoder_layers": 2, "bos_token_id": 1, "decoder_start_token_id": 1}),
        ("classifier", MGKForSequenceClassification, "lra-text", {}),
    ):  # fmt: skip
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp(name)
        kind(architecture(shape, **{**SMALL, **special, **changes})).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def run(*arguments):
    """What the command prints, and its exit code; in this process, since torch takes seconds to import."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_generate_streams_the_continuation(saved):
    done = subprocess.run(
        [sys.executable, "-m", "mgk", "generate", str(saved["writer"]), "Once", "--max-new-tokens", "8"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"Once")
    assert len(done.stdout.strip()) > len("Once")


def test_generate_without_a_cache_writes_the_same(saved):
    options = (saved["writer"], "Once upon", "--max-new-tokens", "12")
    expected = run("generate", *options)
    assert expected.exit_code == 0
    assert run("generate", *options, "--no-cache").stdout == expected.stdout


def test_generate_samples_repeatably(saved):
    options = ("generate", saved["writer"], "Once", "--temperature", "1.5", "--top-k", "50", "--max-new-tokens", "20")
    first = run(*options, "--seed", "3").stdout
    assert run(*options, "--seed", "3").stdout == first
    assert run(*options, "--seed", "4").stdout != first


def test_generate_with_beams(saved):
    result = run("generate", saved["writer"], "Once", "--beams", "3", "--max-new-tokens", "5")
    assert result.exit_code == 0
    assert result.stdout.startswith("Once")


def test_generate_translates(saved):
    result = run("generate", saved["translator"], "Guten Tag", "--max-new-tokens", "6")
    assert result.exit_code == 0
    assert "Guten" not in result.stdout


def test_generate_translates_between_two_vocabularies(tmp_path):
    """The source's tokenizer lies in a folder of its own."""
    source, target = byte_tokenizer(), byte_tokenizer(extra=("<new>",))
    config = architecture(
        "iwslt14", **SMALL, decoder_layers=1, vocab_size=259, source_vocab_size=258, pad_token_id=0, eos_token_id=1,
        bos_token_id=1, decoder_start_token_id=1, tokenizer_sha256=fingerprint(target),
        source_tokenizer_sha256=fingerprint(source),
    )  # fmt: skip
    MGKForSeq2SeqLM(config).save_pretrained(tmp_path)
    target.save_pretrained(tmp_path)
    source.save_pretrained(tmp_path / "source_tokenizer")
    assert run("generate", tmp_path, "Guten Tag", "--max-new-tokens", "3").exit_code == 0
    target.save_pretrained(tmp_path / "source_tokenizer")
    with pytest.raises(ValueError, match="at most source_vocab_size=258 tokens, got 259"):
        run("generate", tmp_path, "Guten Tag")


def test_generate_reads_standard_input(saved):
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["generate", str(saved["writer"]), "--max-new-tokens", "4"], input="Once")
    assert result.exit_code == 0
    assert result.stdout.startswith("Once")


def test_what_the_user_did_wrong_is_one_line(saved, capsys, monkeypatch):
    cases = {
        ("generate", "no-such-folder", "x"): "owner/name on the hub, got 'no-such-folder', where no folder is",
        ("generate", str(saved["writer"]), ""): "the prompt must hold at least one token, got none",
        ("generate", str(saved["writer"]), "x", "--device", "nope"): "nope",
        ("generate", str(saved["writer"]), "x", "--top-k", "5"): "need a --temperature above 0",
        ("generate", str(saved["classifier"]), "x"): "must hold a MGKForCausalLM or MGKForSeq2SeqLM, "
        "got MGKForSequenceClassification",
    }
    for arguments, message in cases.items():
        monkeypatch.setattr("sys.argv", ["mgk", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 1
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_what_a_folder_lacks_is_named(saved, tmp_path):
    """A run, whose models lie deeper, and a model that was saved without a tokenizer."""
    best = tmp_path / "checkpoints" / "best-00000020"
    best.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"got one without config\.json: the best model of this run is .*-00000020$"):
        run("generate", tmp_path, "x")
    for name in ("config.json", "model.safetensors"):
        (best / name).write_bytes((saved["writer"] / name).read_bytes())
    with pytest.raises(
        ValueError, match=r"best-00000020 must hold the tokenizer of its model, got none: runs on bytes"
    ):
        run("generate", best, "x")


def test_another_tokenizer_is_refused(saved, tmp_path):
    """42: a token more than the model has, and as many tokens in another order."""
    import shutil

    shutil.copytree(saved["writer"], tmp_path, dirs_exist_ok=True)
    byte_tokenizer(extra=("<new>",)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must have at most vocab_size=258 tokens, got 259"):
        run("generate", tmp_path, "x")
    swapped = byte_tokenizer().backend_tokenizer.to_str().replace('"A":34', '"A":35').replace('"B":35', '"B":34', 1)
    assert swapped != byte_tokenizer().backend_tokenizer.to_str()
    (tmp_path / "tokenizer.json").write_text(swapped)
    with pytest.raises(ValueError, match="the tokenizer must be the one that the model was trained with"):
        run("generate", tmp_path, "x")


def test_version():
    import mgk

    assert run("--version").stdout == f"mgk {mgk.__version__}\n"
