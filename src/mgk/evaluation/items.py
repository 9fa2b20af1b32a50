"""A compact encoding of the items of a split that a model got right, which is stored in results.

There is a bit for each item, in the order of the corpus: 2,000 items are 336 characters of base64, 25,000 are 4,168.
They allow later analyses of the variance over test items, and a comparison of two models item by item.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack_items(right: NDArray[np.bool_]) -> dict[str, Any]:
    """Encode the items for a result.

    Args:
        right: ``[items]``, whether each was right, in the order of the corpus.
    """
    if right.ndim != 1 or right.dtype != np.bool_ or len(right) == 0:
        raise ValueError(f"right must hold a truth value for each item, got {right.dtype} of shape {right.shape}")
    return {"count": len(right), "right": base64.b64encode(np.packbits(right).tobytes()).decode("ascii")}


def unpack_items(record: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Decode the truth values that :func:`pack_items` encoded."""
    count, text = record.get("count"), record.get("right")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or not isinstance(text, str):
        raise ValueError(
            f"a record of items must have a count and base64 of their bits, got {count!r} and {text!r:.40}"
        )
    try:
        content = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"a record of items must have base64 of their bits, got {error}") from error
    if len(content) != -(-count // 8):
        raise ValueError(f"a record of {count} items must have {-(-count // 8)} bytes, got {len(content)}")
    bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8))
    if bits[count:].any():
        raise ValueError(f"a record of {count} items must have no bits beyond them, got {int(bits[count:].sum())}")
    return bits[:count].astype(np.bool_)
