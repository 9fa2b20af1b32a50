"""A tiny corpus, prepared once."""

import pytest
from training_cases import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus("classification", tmp_path_factory.mktemp("corpora") / "classification")
