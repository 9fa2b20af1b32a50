"""Translations against a beam search that a person can read, and BLEU against what is known of it."""

import io
import math
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import DEVICE
from model_cases import make_model

from mgk.data import store
from mgk.data.kind import no_progress
from mgk.data.translation import BOS, CORPORA, EOS, PAD, decode
from mgk.evaluation.bleu import is_tokenised, references, score, translate
from mgk.evaluation.moses import detokenise
from mgk.evaluation.translation import _generate, _limits, _settings, _Sources

KINDS = {kind.name: kind for kind in CORPORA}
REAL = Path(__file__).parents[3] / "shared" / "data"

GERMAN = ["Ein Hund", "Der Hund läuft über die Straße.", "Ja", "Zwei Katzen schlafen", "Nein, danke", "Gut", "Am Meer"]
ENGLISH = ["A dog", "The dog runs across the street.", "Yes", "Two cats are asleep", "No, thanks", "Good", "At the sea"]

SHORT = {"max_length_ratio": 0.5, "max_length_offset": 2, "device": DEVICE}


def prepare_corpus(folder):
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "tatoeba_deen.tar.xz", "w:xz") as archive:
        for split in ("train", "valid", "test"):
            for language, text in (("de", GERMAN), ("en", ENGLISH)):
                content = "".join(f"{line}\n" for line in text).encode()
                member = tarfile.TarInfo(f"tatoeba_deen.{split}.{language}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    KINDS["tatoeba"].prepare(folder, folder / "out", vocabulary=270, clean_ratio=9)
    return store.load(folder / "out")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("tatoeba"))


def make_translator(corpus, **changes):
    """A model that was never trained, but means it: its weights are large."""
    size = corpus.manifest["facts"]["vocabulary"]
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": EOS}
    sizes = {"vocab_size": size, "source_vocab_size": size, "num_hidden_layers": 1, "decoder_layers": 1}
    return make_model("translation", **{**special, **sizes, **changes})


def naive(model, source, limit, beams, length_penalty, words):
    """fairseq's search for one sentence. Without cache, padding or batch; hypotheses are (score, tokens)."""
    running, finished = [(0.0, [])], []
    for step in range(limit + 1):
        candidates = []
        for total, tokens in running:
            decoder = torch.tensor([[EOS, *tokens]], device=DEVICE)
            with torch.no_grad():
                logits = model(source[None], decoder_input_ids=decoder, use_cache=False).logits[0, -1]
            scores = logits.float().log_softmax(-1)
            for word in [EOS] if step == limit else words:
                if word != EOS or step > 0:
                    candidates.append((total + float(scores[word]), [*tokens, word]))
        candidates = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * beams]
        for total, tokens in candidates[:beams]:
            if tokens[-1] == EOS and len(finished) < beams:
                finished.append((total / len(tokens) ** length_penalty, tokens))
        if len(finished) == beams or step == limit:
            break
        running = [candidate for candidate in candidates if candidate[1][-1] != EOS][:beams]
    return max(finished)[1]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("beams", [2, 5])
@pytest.mark.parametrize("seed", [0, 2, 5])
def test_beam_search_equals_a_plain_one(corpus, beams, length_penalty, seed):
    model = make_translator(corpus, seed=seed, initializer_range=0.15)
    # Some hypotheses end early, which a model of this size does only when told to.
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[EOS] *= 2.5
    words = range(EOS, corpus.manifest["facts"]["vocabulary"])
    expected, ended_early = [], 0
    for index in range(len(GERMAN)):
        source = torch.tensor(corpus.splits["test"].sequences["source"][index].astype(np.int64), device=DEVICE)
        limit = int(0.5 * len(source) + 2)
        tokens = naive(model, source, limit, beams, length_penalty, words)
        ended_early += len(tokens) <= limit
        expected.append(decode(corpus, "target", tokens))
    found = translate(model, corpus, "test", beams=beams, length_penalty=length_penalty, max_tokens=64, **SHORT)
    assert found == expected
    assert ended_early > 0


def test_greedy_search(corpus):
    model = make_translator(corpus)
    found = translate(model, corpus, "test", beams=1, **SHORT)
    source = torch.tensor(corpus.splits["test"].sequences["source"][3].astype(np.int64), device=DEVICE)
    tokens = []
    for step in range(int(0.5 * len(source) + 2)):
        with torch.no_grad():
            logits = model(source[None], decoder_input_ids=torch.tensor([[EOS, *tokens]], device=DEVICE)).logits[0, -1]
        logits[[PAD, BOS] + ([EOS] if step == 0 else [])] = -math.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == EOS:
            break
    assert found[3] == decode(corpus, "target", tokens)


@pytest.mark.parametrize("beams", [1, 4])
def test_a_translation_does_not_depend_on_its_batch(corpus, beams):
    model = make_translator(corpus)
    longest = int(corpus.splits["test"].sequences["source"].lengths.max())
    found = [
        translate(model, corpus, "test", beams=beams, max_tokens=max_tokens, **SHORT)
        for max_tokens in (longest, 2 * longest, 4096)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == len(GERMAN)


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_share_the_sentences(corpus, ranks):
    model = make_translator(corpus)
    source = corpus.splits["test"].sequences["source"]
    sources = _Sources(sentences=source, limits=_limits(model, source, 0.5, 2), max_tokens=int(source.lengths.max()))
    config = _settings(model, corpus, 2, 1.0)
    shares = [_generate(model, sources, config, DEVICE, None, rank, ranks, no_progress) for rank in range(ranks)]
    whole = _generate(model, sources, config, DEVICE, None, 0, 1, no_progress)
    assert torch.equal(sum(shares), whole)
    assert (whole != PAD).any(dim=1).all()
    # Each row has been written by one rank.
    assert (torch.stack([(share != PAD).any(dim=1) for share in shares]).sum(dim=0) == 1).all()


def test_batches_hold_what_fits(corpus):
    source = corpus.splits["test"].sequences["source"]
    sources = _Sources(sentences=source, limits=np.full(len(source), 5), max_tokens=50)
    rows = np.concatenate([sources.rows(0, step) for step in range(len(sources))])
    assert sorted(rows.tolist()) == list(range(len(source)))
    assert (np.diff(source.lengths[rows]) <= 0).all()
    assert len(sources) > 1
    for step in range(len(sources)):
        batch = sources.batch(0, step)
        assert batch["input_ids"].numel() <= 50
        assert batch["attention_mask"].sum(1).tolist() == source.lengths[sources.rows(0, step)].tolist()


def test_limits(corpus):
    model = make_translator(corpus)
    source = corpus.splits["test"].sequences["source"]
    assert _limits(model, source, 0.0, 200).tolist() == [200] * len(GERMAN)
    assert _limits(model, source, 1.2, 10).tolist() == [int(1.2 * length + 10) for length in source.lengths]
    assert _limits(model, source, 0.01, 0).min() == 1
    longest = int(source.lengths.max())
    learned = make_translator(corpus, positions="learned", max_position_embeddings=longest)
    assert _limits(learned, source, 0.0, 200).tolist() == [longest - 1] * len(GERMAN)
    assert len(translate(learned, corpus, "test", beams=2, device=DEVICE)) == len(GERMAN)
    short = make_translator(corpus, positions="learned", max_position_embeddings=longest - 1)
    with pytest.raises(ValueError, match=f"at most max_position_embeddings={longest - 1} tokens, got {longest}"):
        translate(short, corpus, "test", device=DEVICE)


def test_the_model_comes_back_as_it_was_and_its_own_settings_do_not_count(corpus):
    model = make_translator(corpus, dropout=0.3)
    expected = translate(model, corpus, "test", beams=3, **SHORT)
    model.train()
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.max_length = 3
    saved = model.generation_config
    assert translate(model, corpus, "test", beams=3, **SHORT) == expected
    assert model.generation_config is saved
    assert model.training
    assert torch.is_grad_enabled()


def test_a_vocabulary_that_was_rounded_up(corpus):
    """Words that the corpus does not have are never said."""
    size = corpus.manifest["facts"]["vocabulary"]
    model = make_translator(corpus, vocab_size=size + 200)
    assert len(translate(model, corpus, "test", beams=2, **SHORT)) == len(GERMAN)


@pytest.mark.parametrize(
    ("changes", "model_changes", "match"),
    [
        ({"beams": 0}, {}, "beams must be at least 1, got 0"),
        ({"split": "dev"}, {}, "split must be one of test, train, valid, got 'dev'"),
        ({"max_tokens": 20}, {}, r"max_tokens must hold the longest sentence of \d+ tokens, got 20"),
        ({"max_length_ratio": -1.0}, {}, "must not be negative nor both 0, got -1.0 and 200"),
        ({"max_length_offset": 0}, {}, "must not be negative nor both 0, got 0.0 and 0"),
        ({"ranks": 2}, {}, r"ranks must be the 1 of torch\.distributed, or 1, got 2"),
        ({}, {"vocab_size": 100}, r"vocab_size of the model must be at least the 270 tokens of tatoeba, got 100"),
        ({}, {"source_vocab_size": 100}, r"source_vocab_size of the model must be at least the 270 tokens"),
        ({}, {"eos_token_id": 5}, "must have eos_token_id=2 and a decoder_start_token_id, got 5 and 2"),
        ({}, {"decoder_start_token_id": None}, "must have eos_token_id=2 and a decoder_start_token_id, got 2 and None"),
    ],
)
def test_bad_inputs(corpus, changes, model_changes, match):
    model = make_translator(corpus, **model_changes)
    options = {"split": "test", "device": DEVICE, **changes}
    with pytest.raises(ValueError, match=match):
        translate(model, corpus, options.pop("split"), **options)


def test_references(corpus):
    assert references(corpus, "test") == ENGLISH
    assert not is_tokenised(corpus)
    with pytest.raises(ValueError, match="split must be one of test, train, valid, got 'dev'"):
        references(corpus, "dev")


@pytest.mark.parametrize("tokenised", [False, True])
def test_perfect_and_empty_translations(tokenised):
    perfect = score(ENGLISH, ENGLISH, tokenised=tokenised)
    assert perfect.bleu == pytest.approx(100)
    assert perfect.tokenised_lowercase_bleu == pytest.approx(100)
    assert (perfect.length_ratio, perfect.brevity_penalty, perfect.sentences) == (1.0, 1.0, len(ENGLISH))
    empty = score([""] * len(ENGLISH), ENGLISH, tokenised=tokenised)
    assert (empty.bleu, empty.tokenised_lowercase_bleu, empty.length_ratio) == (0.0, 0.0, 0.0)


def test_the_signature_says_what_was_done():
    plain = score(ENGLISH, ENGLISH, tokenised=False)
    assert plain.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert plain.tokenised_signature.startswith("nrefs:1|case:lc|eff:no|tok:13a|smooth:none|version:")
    tokenised = score(ENGLISH, ENGLISH, tokenised=True, lowercase=True)
    assert tokenised.signature.startswith("nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:")
    assert tokenised.tokenised_signature.startswith("nrefs:1|case:lc|eff:no|tok:none|smooth:none|version:")


def test_case_and_tokens():
    shouted = [line.upper() for line in ENGLISH]
    assert score(shouted, ENGLISH, tokenised=False).bleu < 5
    assert score(shouted, ENGLISH, tokenised=False, lowercase=True).bleu == pytest.approx(100)
    assert score(shouted, ENGLISH, tokenised=False).tokenised_lowercase_bleu == pytest.approx(100)
    # As they stand these are other tokens; detokenised they are the same text.
    spaced, glued = ["we &apos;re all born , too ."], ["we&apos;re all born, too."]
    assert score(spaced, glued, tokenised=True).tokenised_lowercase_bleu < 50
    assert score(spaced, glued, tokenised=True).bleu == pytest.approx(100)


def test_tokenised_bleu_by_hand():
    """Of 7 words 6, of 6 pairs 4, of 5 triples 2, of 4 fours 1 are in the reference, which has 8 words."""
    found = score(["a b c d x f g"], ["a b c d e f g h"], tokenised=True)
    precisions = (6 / 7) * (4 / 6) * (2 / 5) * (1 / 4)
    assert found.tokenised_lowercase_bleu == pytest.approx(100 * math.exp(1 - 8 / 7) * precisions**0.25)
    assert found.brevity_penalty == pytest.approx(math.exp(1 - 8 / 7))
    assert found.length_ratio == pytest.approx(7 / 8)


def test_scores_that_do_not_exist():
    with pytest.raises(ValueError, match="hypotheses must be as many as the 7 references, got 6"):
        score(ENGLISH[:-1], ENGLISH, tokenised=False)
    with pytest.raises(ValueError, match="references must hold at least one sentence, got none"):
        score([], [], tokenised=False)


@pytest.mark.parametrize(
    ("tokenised", "plain"),
    [
        ("", ""),
        ("we &apos;re all born . really ?", "we're all born. really?"),
        ("it shouldn &apos;t , i &apos;ve heard", "it shouldn't, i've heard"),
        ("he said , &quot; no &quot; , and &quot; yes ! &quot;", 'he said, "no", and "yes!"'),
        ("&quot; ( all of them ) &quot; &#91; laughter &#93;", '"(all of them)" [laughter]'),
        ("$ 5 , 10 % and a well @-@ known - or -- dash ...", "$5, 10% and a well-known - or -- dash..."),
        ("the jones &apos; house", "the jones' house"),
        ("a &apos; quoted &apos; word", "a 'quoted' word"),
        ("r &amp; d &lt; x &amp;lt; y &#124; z", "r & d < x &lt; y | z"),
        ("the &apos;90s , &apos;s", "the '90s, 's"),
        ("6,000 a.m. 3.5", "6,000 a.m. 3.5"),
    ],
)
def test_detokenise(tokenised, plain):
    assert detokenise(tokenised) == plain


def test_real_iwslt14(tmp_path):
    """Its references, scored against themselves and against others."""
    if not (REAL / "iwslt14_partial.tar.xz").is_file():
        pytest.skip(f"needs {REAL / 'iwslt14_partial.tar.xz'}, which is not there")
    KINDS["iwslt14"].prepare(REAL, tmp_path / "out", vocabulary=1_000)
    corpus = store.load(tmp_path / "out")
    assert is_tokenised(corpus)
    expected = references(corpus, "test")
    assert len(expected) == 6_750
    assert any("&apos;s" in line for line in expected)
    perfect = score(expected, expected, tokenised=True)
    assert perfect.bleu == pytest.approx(100)
    assert perfect.tokenised_lowercase_bleu == pytest.approx(100)
    # A word is lost from every sentence.
    worse = score([line.partition(" ")[2] for line in expected], expected, tokenised=True)
    assert 80 < worse.tokenised_lowercase_bleu < 99
    assert worse.bleu == pytest.approx(worse.tokenised_lowercase_bleu, abs=3)
