"""Tiny corpora, prepared once."""

import functools

import pytest
from training_cases import make_corpus


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """The corpus of a task, by its name."""
    folder = tmp_path_factory.mktemp("corpora")
    return functools.cache(lambda task: make_corpus(task, folder / task))


@pytest.fixture(scope="session")
def corpus(corpora):
    return corpora("classification")
