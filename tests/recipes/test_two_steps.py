"""Every recipe that comes with the library trains: two updates and a validation on a tiny corpus of its own kind.

Only what size forces is changed. Steps, batch, optimiser and losses are those of the YAML file.
"""

import functools
import io
import json
import math
import random
import tarfile

import pytest
import torch
from training_cases import ENGLISH, GERMAN, make_trainer, take_steps

from mgk.data.enwik8_words import split_of
from mgk.recipes import load, names, parse_row
from mgk.training import Trainer, open_or_prepare
from uptraining_cases import write_model

# The default row (None) and mixtures; together every kind of row that any recipe has.
ROWS = {
    "demo": [None, "smgk-4", "gaussian-4"],
    "enwik8": [None, "smgk-4"],
    "enwik8-equal-cache": [None, "smgk-4+num_components=4"],
    "enwik8-shifts": [None, "smgk-4+num_components=1"],
    "enwik8-small": [None, "mgk-4", "softmax-8+num_key_value_heads=4+qk_norm"],
    "enwik8-words": [None, "smgk-4"],
    "enwik8-words-linear": [None, "smlk-4"],
    "enwik8-words-multi-query": [None, "mgk-4+num_key_value_heads=1"],
    "iwslt14": [None, "smgk-2+variance_scale=1,3"],
    "iwslt14-variances": [None, "mgk-2+learn_variance"],
    "lra/listops": [None, "smgk-hard-1", "mgk-em-1"],
    "lra/listops-dropout-0": [None, "mgk-1"],
    "lra/listops-fp16": [None, "smgk-4"],
    "lra/listops-fp32": [None, "smgk-4"],
    "lra/listops-learnable": [None, "smgk-4"],
    "lra/listops-linear": [None, "mlk-4"],
    "lra/listops-no-activation-dropout": [None, "smgk-1"],
    "lra/listops-mean-over-tokens": [None, "mgk-1"],
    "lra/listops-mean-over-tokens-dropout-0": [None, "smgk-1"],
    "lra/listops-released-shifts": [None, "smgk-1"],
    "lra/listops-shifts": [
        None, "smgk-4+shift_init_std=0.3", "smgk-4+prior=uniform", "softmax-4+query_bias_init_std=1",
    ],
    "lra/listops-small-shifts": [None, "smgk-1"],
    "lra/listops-unpacked": [None, "smgk-4"],
    "lra/retrieval": [None, "mgk-hard-1", "softmax-smgk-1"],
    "lra/retrieval-linear": [None, "smlk-4"],
    "lra/text": [None, "smgk-em-1", "softmax-mgk-1"],
    "lra/text-dropout-0": [None, "smgk-1"],
    "lra/text-linear": [None, "linear-4", "smlk-4"],
    "lra/text-no-activation-dropout": [None, "smgk-4"],
    "multi30k": [None, "smgk-2"],
    "multi30k-variances": [None, "mgk-2+variance_scale=1,0.5"],
    "peerread": [None, "mgk-4"],
    "smollm2": [None, "gaussian-9", "smgk-9", "smgk-9+num_components=4", "mgk-9"],
    "smollm2-distilled": [None, "smgk-9"],
    "tatoeba": [None, "mgk-2", "softmax-2+qk_norm"],
    "wikitext103/medium": [None, "mgk-4"],
    "wikitext103/multi-query": [
        None, "mgk-4+num_key_value_heads=1", "softmax-8+num_key_value_heads=1",
        "softmax-8+num_key_value_heads=1+qk_norm", "gaussian-8+num_key_value_heads=1",
        "smgk-8+num_key_value_heads=1",
    ],
    "wikitext103/small": [None, "mgk-4+variance_scale=1,3"],
    "wikitext103/small-linear": [None, "mlk-4"],
    "wikitext2": [None, "smgk-4"],
    "wmt14": [None, "mgk-8+variance_scale=1,3"],
}  # fmt: skip

LISTS = ["data.options.train=40", "data.options.valid=8", "data.options.test=8"]
WORDS = ["data.longest=4", "model.num_hidden_layers=1"]
# The second of 4000 steps of a warm-up is so short that variances lose it to rounding.
SENTENCES = ["model.num_hidden_layers=1", "model.decoder_layers=1", "schedule.warmup=40"]

DUMP_SIZE = 40_000
"""Bytes, with spaces at the end."""

# As few as possible: the tiny texts are short anyway, so long windows, many layers and large vocabularies have to go.
CHANGES = {
    "demo": ["data.options.train=70", *LISTS[1:]],
    "enwik8": ["data.options.size=2000", "data.longest=8", "model.num_hidden_layers=1"],
    "enwik8-shifts": ["data.options.size=2000", "data.longest=8", "model.num_hidden_layers=1"],
    "enwik8-words": [f"data.options.size={DUMP_SIZE}", *WORDS, "model.adaptive_cutoffs=[8, 16]"],
    "enwik8-words-multi-query": [f"data.options.size={DUMP_SIZE}", *WORDS, "model.adaptive_cutoffs=[8, 16]"],
    "iwslt14": SENTENCES,
    "iwslt14-variances": SENTENCES,
    "lra/listops": [*LISTS, "data.options.minimum=5", "data.options.maximum=24"],
    "lra/retrieval": [],
    "lra/text": [],
    "multi30k": SENTENCES,
    "multi30k-variances": SENTENCES,
    "peerread": [],
    "smollm2": ["data.longest=4", "data.options.enwik8_bytes=0"],
    "smollm2-distilled": ["data.longest=4", "data.options.enwik8_bytes=0"],
    "tatoeba": SENTENCES,
    "wikitext103/medium": [*WORDS, "model.adaptive_cutoffs=[8, 16, 32]"],
    "wikitext103/multi-query": [*WORDS, "model.adaptive_cutoffs=[8, 16, 32]"],
    "wikitext103/small": [*WORDS, "model.adaptive_cutoffs=[8, 16, 32]"],
    "wikitext2": [*WORDS, "model.adaptive_cutoffs=[8, 16]"],
    "wmt14": [*SENTENCES, "model.hidden_size=64", "model.intermediate_size=64"],
}


# Where one thing is added to every key, as the shifts of softmax-smgk are, softmax of dot products sees none of it.
CANCELS = ("k_proj.bias", "keys.shift", "prior.logits")


def archive(path, files):
    """A tar of texts by name."""
    with tarfile.open(path, "w:xz") as made:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            made.addfile(member, io.BytesIO(text.encode()))


def write_sources(folder):
    """The raw files of every corpus, each in its published layout, with enough in it for one batch of the recipes."""
    drawn = random.Random(0)
    words = [f"w{number}" for number in range(48)]

    def sentence(count):
        return " ".join(drawn.choices(words, k=count))

    documents = {f"p{number}": sentence(6) for number in range(8)}
    splits = {"train": 36, "valid": 4, "test": 4}
    pairs = {
        split: [(number % 2, *drawn.sample(sorted(documents), 2)) for number in range(count)]
        for split, count in splits.items()
    }
    for split, count in (("train", 40), ("test", 6)):
        lines = [json.dumps({"label": number % 2, "text": sentence(5)}) for number in range(count)]
        (folder / f"imdb_{split}.jsonl").write_text("\n".join(lines) + "\n")
    for split, name in (("train", "train"), ("valid", "eval"), ("test", "test")):
        lines = [f"{label}.0\t{a}\t{b}\t{documents[a]}\t{documents[b]}" for label, a, b in pairs[split]]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")
    papers = [json.dumps({"id": number, "text": text}) for number, text in documents.items()]
    (folder / "peerread_docs_4k.jsonl").write_text("\n".join(papers) + "\n")
    archive(
        folder / "peerread_pairs.tar.xz",
        {
            f"peerread_pairs.{split}.tsv": "".join(f"{label}\t{a}\t{b}\n" for label, a, b in found)
            for split, found in pairs.items()
        },
    )
    # Articles whose titles deal them to every split.
    titles = {split_of(f"Article {number}"): f"Article {number}" for number in range(500)}
    pages = "".join(
        f"<page><title>{title}</title><text>{sentence(120)}.</text></page>\n"
        for title in (*titles.values(), *(f"Article {number}" for number in range(50)))
    )
    (folder / "enwik8").write_text(pages.ljust(DUMP_SIZE))
    for name in ("wikitext-2", "wikitext-103"):
        (folder / name).mkdir()
        for split, count in (("train", 96), ("valid", 4), ("test", 4)):
            lines = [" ".join(words), *(sentence(7) for _ in range(count))]
            (folder / name / f"wiki.{split}.tokens").write_text("\n".join(lines) + "\n")
    text = {language: "".join(f"{line}\n" for line in lines) for language, lines in (("de", GERMAN), ("en", ENGLISH))}
    captions = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco", "test_2018_flickr")
    for name, stem, members in (
        ("multi30k_deen", "multi30k", captions),
        ("tatoeba_deen", "tatoeba_deen", ("train", "valid", "test")),
    ):
        archive(folder / f"{name}.tar.xz", {f"{stem}.{each}.{side}": text[side] for each in members for side in text})
    for name in ("iwslt14", "wmt14"):
        (folder / name).mkdir()
        for split in splits:
            for side in text:
                (folder / name / f"{split}.{side}").write_text(text[side])


# Those with linear attention, and variants, are made as what they differ from.
CHANGES["enwik8-equal-cache"] = CHANGES["enwik8-small"] = CHANGES["enwik8"]
CHANGES |= {name: CHANGES[name.partition("-")[0]] for name in ROWS if name.startswith("lra/")}
CHANGES |= {name: CHANGES[name.removesuffix("-linear")] for name in ROWS if name.endswith("-linear")}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def corpora(tmp_path_factory, monkeypatch_module):
    """The corpus that a configuration asks for, prepared as ``mgk train`` would."""
    source, cache = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("cache")
    write_sources(source)
    weights = tmp_path_factory.mktemp("weights")
    write_model(weights / "SmolLM2-135M-Instruct", heads=9, kv_heads=3)
    monkeypatch_module.setenv("MGK_WEIGHTS", str(weights))

    @functools.cache
    def prepared(name):
        data = tiny(name).data
        return open_or_prepare(data, source=source, folder=cache / name.replace("/", "-"))

    return prepared


def tiny(name, row=None):
    return load(name).config(row, CHANGES[name])


def kind(row):
    """A row without its numbers: the preset, and which options there are."""
    fields = parse_row(row)
    return fields["attention"], *sorted(fields.keys() - {"attention", "num_attention_heads"})


def test_every_recipe_and_every_kind_of_row_is_here():
    assert ROWS.keys() == CHANGES.keys() == set(names())
    for name, rows in ROWS.items():
        assert rows[0] is None
        assert set(rows[1:]) <= set(load(name).rows)
        assert any(kind(row)[0] not in ("softmax", "gaussian") for row in rows[1:])
    wanted = {kind(row) for name in ROWS for row in load(name).rows}
    tried = {kind(row) for rows in ROWS.values() for row in rows if row is not None}
    # The default row of each is plain softmax.
    assert {tiny(name).row.partition("-")[0] for name in ROWS} == {"softmax"}
    assert tried | {("softmax",)} == wanted


def second_rates(optimizer, schedule, warmup):
    """Learning rate and first beta of the second update, by hand from the values of a YAML file."""
    lr, initial = optimizer["lr"], schedule.get("initial", 0.0)
    if schedule["kind"] == "onecycle":
        return lr / 25 + (lr - lr / 25) / (warmup - 1), 0.95 - 0.1 / (warmup - 1)
    return initial + (lr - initial) / warmup, optimizer["betas"][0]


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in ROWS.items() for row in rows])
def test_two_steps(corpora, tmp_path, name, row):
    config = tiny(name, row)
    trainer = make_trainer(config, tmp_path, corpora(name), Trainer)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    gradients = {}
    for key, parameter in trainer.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, key=key: gradients.update({key: gradients.get(key, 0.0) + float(p.grad.abs().sum())})
        )
    assert trainer.optimizer.param_groups[0]["lr"] == load(name).values["optimizer"]["lr"]

    take_steps(trainer, 2)
    assert trainer.state.step == 2
    assert trainer.state.skipped == 0
    assert len(trainer.state.losses) == 2
    assert all(math.isfinite(loss) for loss in trainer.state.losses)
    check_optimizer(trainer, load(name).values)

    # Every parameter has had a gradient and has moved, but for those that cancel in the softmax of dot products: there
    # the gradient is zero up to rounding.
    after = trainer.model.state_dict()
    assert gradients.keys() == dict(trainer.model.named_parameters()).keys()
    idle = {key for key in gradients if torch.equal(after[key], before[key])}
    if config.row.startswith("softmax"):
        idle -= {key for key in idle if key.endswith(CANCELS) and gradients[key] < 1e-5}
    assert idle == set()
    if "-em-" in config.row:
        priors = [key for key in after if key.endswith("prior.log_prior")]
        assert len(priors) == trainer.model.config.num_hidden_layers
        assert not any(torch.equal(after[key], before[key]) for key in priors)

    metrics = trainer.validate()
    assert all(math.isfinite(value) for value in metrics.values())
    assert {"loss", config.validation.metric} <= metrics.keys()
    assert trainer.state.best_step == 2
    assert (tmp_path / "checkpoints" / "best-00000002" / "model.safetensors").is_file()


def check_optimizer(trainer, values):
    """As the YAML says, and no decay where it would make a statement about the data."""
    wanted = values["optimizer"]
    lr, beta1 = second_rates(wanted, values["schedule"], trainer.config.schedule.warmup)
    decayed, others = trainer.optimizer.param_groups
    for group in (decayed, others):
        assert group["lr"] == pytest.approx(lr, rel=1e-12)
        assert group["betas"] == pytest.approx((beta1, wanted["betas"][1]), rel=1e-12)
        assert group["eps"] == wanted.get("eps", 1e-8)
    assert (decayed["weight_decay"], others["weight_decay"]) == (wanted["weight_decay"], 0.0)
    without = {id(p) for p in others["params"]}
    for key, parameter in trainer.model.named_parameters():
        is_mixture = key.endswith(("keys.shift", "prior.logits", "log_variance"))
        assert (id(parameter) in without) is (is_mixture or parameter.ndim < 2), key
