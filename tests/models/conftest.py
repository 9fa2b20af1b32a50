"""Models and their inputs live on the device that `MGK_TEST_DEVICE` names."""

import pytest
import torch
from cases import DEVICE


@pytest.fixture(autouse=True)
def default_device():
    # Only where it changes anything: a default device hides from torch.compile.
    torch.set_default_device(None if DEVICE.type == "cpu" else DEVICE)
    yield
    torch.set_default_device(None)
