"""ListOps: values against hand-computed ones, draws against the exact distribution of the grammar."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from mgk.data import listops
from mgk.data.errors import DataError
from mgk.data.store import Corpus, Sequences, load, verify

SHORT = {"train": 300, "valid": 40, "test": 50, "minimum": 5, "maximum": 50}


def make(folder: Path, **options) -> Corpus:
    listops.prepare(None, folder, **options)
    return load(folder)


def texts(corpus: Corpus, split: str) -> list[bytes]:
    sequences = corpus.splits[split].sequences["text"]
    return [sequences[i].tobytes() for i in range(len(sequences))]


def arrays(corpus: Corpus) -> dict[str, str]:
    return corpus.manifest["arrays"]


def length_distribution(minimum: int, maximum: int) -> np.ndarray:
    """Probability of each length ``[maximum]``, given the window: the generating function of the grammar, by depth."""
    function = np.zeros(maximum)
    function[1] = 1
    for _ in range(9):
        power, powers = function, np.zeros(maximum)
        for _ in range(2, 11):
            power = np.convolve(power, function)[:maximum]
            powers += power / 9
        function = 0.25 * np.concatenate([np.zeros(2), powers[:-2]])
        function[1] += 0.75
    function[: minimum + 1] = 0
    return function / function.sum()


def draw_many(count: int, minimum: int = 500, maximum: int = 2_000) -> tuple[Sequences, np.ndarray]:
    chunks = [listops.draw(7, chunk, minimum, maximum) for chunk in range(count)]
    tokens, lengths, labels = zip(*chunks, strict=True)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return Sequences(np.frombuffer(b"".join(tokens), dtype=np.uint8), offsets), np.concatenate(labels)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make(tmp_path_factory.mktemp("listops") / "short", **SHORT)


@pytest.fixture(scope="module")
def drawn() -> tuple[Sequences, np.ndarray]:
    """About 8,000 trees of the default lengths."""
    return draw_many(6)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 4 7 3 9 ]", 3),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 9 5 ]", 5),
        ("[MED 9 1 8 2 2 ]", 2),
        ("[MED 4 8 ]", 6),
        ("[MED 3 8 ]", 5),
        ("[MED 0 0 1 9 ]", 0),
        ("[MED 9 1 2 5 ]", 3),
        ("[SM 9 9 9 ]", 7),
        ("[SM 5 5 ]", 0),
        ("[SM 9 9 9 9 9 9 9 9 9 9 ]", 0),
        ("[SM [MAX 1 2 ] [MIN [SM 7 6 ] 8 ] [MED 4 [MAX 9 0 ] 5 ] ]", 0),
        ("[MIN [MIN [MIN 5 6 ] 7 ] 8 ]", 5),
        ("[MAX [SM 8 8 ] [MED 2 [SM 1 1 ] 7 9 ] ]", 6),
    ],
)
def test_value(text: str, value: int) -> None:
    assert listops.evaluate(listops.encode(text)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "whole, got its end at position 0"),
        ("[MAX 1 2", "whole, got its end at position 3 with 1 open"),
        ("[MAX 1 [MIN 2 3 ]", "position 6 with 1 open"),
        ("]", "closing bracket must have an operator, got none at position 0"),
        ("[MAX 1 2 ] ]", "another token at position 4"),
        ("[MAX 1 2 ] 3", "another token at position 4"),
        ("1 2", "another token at position 1"),
        ("[MAX 1 [MED ] ]", "must have arguments, got its closing bracket at position 3"),
    ],
)
def test_malformed_trees_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        listops.evaluate(listops.encode(text))


@pytest.mark.parametrize("token", [0, 16, -1])
def test_unknown_ids_are_refused(token: int) -> None:
    with pytest.raises(DataError, match=rf"\[1, 15\], got {token} at position 1"):
        listops.evaluate([2, token, 7, 5])


def test_vocabulary() -> None:
    text = "[MIN [MAX [MED [SM ] 0 1 2 3 4 5 6 7 8 9"
    tokens = listops.encode(text)
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == list(range(1, 16))
    assert listops.decode(None, "text", np.append(tokens, [0, 0])) == text


def test_unknown_text_is_refused() -> None:
    with pytest.raises(DataError, match=r"got '\[AVG' at position 2"):
        listops.encode("[MAX 1 [AVG 2 3 ] ]")
    with pytest.raises(DataError, match="got 16 at position 1"):
        listops.decode(None, "text", np.array([2, 16]))


def test_corpus(short: Corpus) -> None:
    verify(short)
    assert short.name == "listops"
    assert short.manifest["options"] == {"seed": 0, **SHORT}
    for split, count in (("train", 300), ("valid", 40), ("test", 50)):
        sequences, labels = short.splits[split].sequences["text"], short.splits[split].numbers["labels"]
        assert len(sequences) == len(labels) == count
        assert sequences.tokens.dtype == np.uint8
        assert labels.dtype == np.int64
        assert sequences.lengths.min() > 5
        assert sequences.lengths.max() < 50
        assert [listops.evaluate(sequences[i]) for i in range(count)] == labels.tolist()


def test_trees_are_distinct(short: Corpus) -> None:
    trees = [tree for split in ("train", "valid", "test") for tree in texts(short, split)]
    assert len(set(trees)) == len(trees)


def test_round_trip(short: Corpus) -> None:
    for tree in texts(short, "test"):
        tokens = np.frombuffer(tree, dtype=np.uint8)
        text = listops.decode(short, "text", tokens)
        assert text.startswith("[")
        assert np.array_equal(listops.encode(text), tokens)


def test_seed_decides(short: Corpus, tmp_path: Path) -> None:
    assert arrays(make(tmp_path / "same", **SHORT)) == arrays(short)
    other = make(tmp_path / "other", **SHORT, seed=1)
    assert not set(arrays(other).values()) & set(arrays(short).values())


def test_processes_do_not_matter(tmp_path: Path) -> None:
    # Default lengths: several chunks, so the order in which they are done could show.
    sizes = {"train": 4_000, "valid": 50, "test": 50}
    alone = make(tmp_path / "alone", **sizes)
    together = make(tmp_path / "together", **sizes, processes=2)
    assert together.manifest == alone.manifest


def test_held_out_trees_do_not_depend_on_the_training_size(short: Corpus, tmp_path: Path) -> None:
    smaller = make(tmp_path / "smaller", **{**SHORT, "train": 20})
    assert texts(smaller, "valid") == texts(short, "valid")
    assert texts(smaller, "test") == texts(short, "test")
    assert texts(smaller, "train") == texts(short, "train")[:20]


def test_progress_counts_trees(tmp_path: Path) -> None:
    seen = []

    def progress(steps, description, total=None):
        seen.append((description, total))
        for step in steps:
            seen.append(step)
            yield step

    listops.prepare(None, tmp_path / "corpus", progress, **SHORT)
    assert seen[0] == ("drawing trees", 390)
    assert len(seen) == 391


def test_small_windows(tmp_path: Path) -> None:
    # All ten digits, and all 400 trees of four tokens: duplicates are dropped until every tree was seen.
    digits = make(tmp_path / "digits", train=6, valid=2, test=2, minimum=0, maximum=2)
    trees = [tree for split in digits.splits for tree in texts(digits, split)]
    assert sorted(trees) == [bytes([token]) for token in range(6, 16)]
    pairs = make(tmp_path / "pairs", train=398, valid=1, test=1, minimum=3, maximum=5)
    assert len({tree for split in pairs.splits for tree in texts(pairs, split)}) == 400


@pytest.mark.parametrize(("window", "found"), [({"minimum": 0, "maximum": 2}, 10), ({"minimum": 1, "maximum": 4}, 0)])
def test_exhausted_windows_are_refused(
    window: dict[str, int], found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listops, "PATIENCE", 4)
    with pytest.raises(ValueError, match=f"must be common enough for 11 distinct ones, got {found} and"):
        listops.prepare(None, tmp_path / "corpus", train=9, valid=1, test=1, **window)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": 0.5}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer of at least 0, got True"),
        ({"train": 0}, "train must be an integer of at least 1, got 0"),
        ({"valid": -5}, "valid must be"),
        ({"test": "many"}, "test must be an integer of at least 1, got 'many'"),
        ({"minimum": -1}, "minimum must be"),
        ({"minimum": 500, "maximum": 501}, r"maximum must be at least minimum \+ 2 = 502, got 501"),
        ({"minimum": 2_000, "maximum": 500}, "maximum must be at least"),
        ({"processes": 0}, "processes must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        listops.prepare(None, tmp_path / "corpus", **options)
    assert not any(tmp_path.iterdir())


def test_labels_of_long_trees(drawn: tuple[Sequences, np.ndarray]) -> None:
    sequences, labels = drawn
    assert all(listops.evaluate(sequences[i]) == labels[i] for i in range(1_000))


def test_trees_follow_the_grammar(drawn: tuple[Sequences, np.ndarray]) -> None:
    sequences, _ = drawn
    deepest = 0
    for i in range(500):
        counts = [0]
        for token in sequences[i].tolist():
            if token == listops.IDS["]"]:
                assert 2 <= counts.pop() <= 10
                continue
            counts[-1] += 1
            # The length of the stack is the depth of this node.
            deepest = max(deepest, len(counts))
            if token < listops.IDS["]"]:
                assert len(counts) < 10
                counts.append(0)
        assert counts == [1]
    assert deepest == 10


def test_lengths_are_distributed_as_in_the_grammar(drawn: tuple[Sequences, np.ndarray]) -> None:
    expected = length_distribution(500, 2_000)
    mean = expected @ np.arange(2_000)
    deviation = np.sqrt(expected @ (np.arange(2_000) - mean) ** 2)
    lengths = drawn[0].lengths
    assert mean == pytest.approx(1_035.0, abs=0.1)
    assert lengths.min() > 500
    assert lengths.max() < 2_000
    assert abs(lengths.mean() - mean) < 4 * deviation / np.sqrt(len(lengths))
    # As many trees are kept as the grammar has in the window, about one in twelve.
    assert 6 * listops.CHUNK / len(lengths) == pytest.approx(12.08, rel=0.06)


def test_short_lengths_are_distributed_as_in_the_grammar() -> None:
    expected = length_distribution(3, 40)
    lengths = draw_many(4, minimum=3, maximum=40)[0].lengths
    found = np.bincount(lengths, minlength=40) / len(lengths)
    assert np.all(np.abs(found - expected) <= 4.5 * np.sqrt(expected / len(lengths)))


def test_symbols_are_uniform(drawn: tuple[Sequences, np.ndarray]) -> None:
    counts = np.bincount(drawn[0].tokens, minlength=16)
    assert counts[0] == 0
    assert counts[5] == counts[1:5].sum()
    for symbols in (counts[1:5], counts[6:]):
        assert np.all(np.abs(symbols - symbols.mean()) < 4.5 * np.sqrt(symbols.mean()))


def test_labels_and_root_rule(drawn: tuple[Sequences, np.ndarray]) -> None:
    sequences, labels = drawn
    shares = np.bincount(labels, minlength=10) / len(labels)
    assert shares[[0, 9]] == pytest.approx(0.17, abs=0.025)
    assert np.all((shares[1:9] > 0.06) & (shares[1:9] < 0.10))
    half = len(labels) // 2
    train = Sequences(sequences.tokens, sequences.offsets[: half + 1])
    rest = Sequences(sequences.tokens, sequences.offsets[half:])
    accuracy = listops.root_operator_rule(train, labels[:half], rest, labels[half:])
    assert accuracy == pytest.approx(0.362, abs=0.025)


def test_root_rule_by_hand() -> None:
    def sequences(*trees: str) -> Sequences:
        tokens = [listops.encode(tree) for tree in trees]
        return Sequences(np.concatenate(tokens), np.cumsum([0, *map(len, tokens)]))

    train = sequences("[MAX 9 1 ]", "[MAX 9 2 ]", "[MAX 3 2 ]", "[MIN 0 4 ]")
    test = sequences("[MIN 0 1 ]", "[MAX 9 9 ]", "[MAX 3 3 ]", "[MIN 5 5 ]")
    assert listops.root_operator_rule(train, np.array([9, 9, 3, 0]), test, np.array([0, 9, 3, 5])) == 0.5


def test_kind() -> None:
    kind = listops.CORPUS
    assert kind.is_generated
    assert kind.task == "classification"
    assert kind.prepare is listops.prepare
    assert kind.options == listops.prepare.__kwdefaults__


@pytest.mark.slow
def test_full_corpus(tmp_path: Path) -> None:
    start = time.perf_counter()
    corpus = make(tmp_path / "listops")
    assert time.perf_counter() - start < 60
    train = corpus.splits["train"]
    sequences, labels = train.sequences["text"], train.numbers["labels"]
    assert [len(corpus.splits[split].numbers["labels"]) for split in ("train", "valid", "test")] == [
        96_000,
        2_000,
        2_000,
    ]
    assert sequences.lengths.mean() == pytest.approx(1_035, abs=5)
    assert np.median(sequences.lengths) == pytest.approx(954, abs=7)
    shares = np.bincount(labels) / len(labels)
    assert shares[[0, 9]] == pytest.approx(0.17, abs=0.005)
    assert np.all((shares[1:9] > 0.065) & (shares[1:9] < 0.095))
    assert listops.root_operator_rule(sequences, labels, sequences, labels) == pytest.approx(0.362, abs=0.005)
    trees = [tree for split in corpus.splits for tree in texts(corpus, split)]
    assert len(set(trees)) == 100_000
