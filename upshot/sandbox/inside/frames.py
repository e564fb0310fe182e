"""Tables of pandas across the wall: frames and series with a plain index are data, cell by cell.

Comparisons, sums and checks of a table then run on a table built here; the program's own would answer what suits it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from upshot.sandbox.inside import plain

_NUMBERS = re.compile(r"[<>|=][biufMm]\d{1,2}(\[[a-zA-Z]{1,3}\])?")
_OTHERS = frozenset(("object", "str", "string", "category", "boolean", "Int64", "Float64"))
_Inner = Callable[[Any], Any]


def encode(value: Any, inner: _Inner) -> Any:
    """The JSON form of a table, None for anything else and for one that does not fit."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "pandas" or kind.__name__ not in ("DataFrame", "Series"):
        return None
    import pandas as pd

    if kind is pd.DataFrame:
        columns = [value.iloc[:, number] for number in range(value.shape[1])]
        parts = [value.index, value.columns, *columns]
    elif kind is pd.Series:
        parts = [value.index, value]
    else:
        return None
    written = [_encode_part(part, inner) for part in parts]
    return None if None in written else {"P": [kind.__name__, *written]}


def _encode_part(part: Any, inner: _Inner) -> Any:
    dtype = getattr(part.dtype, "str", str(part.dtype))
    if getattr(part, "nlevels", 1) != 1 or not (_NUMBERS.fullmatch(dtype) or dtype == "|O" or str(dtype) in _OTHERS):
        return None
    times = dtype[1:2] in ("M", "m") and dtype not in _OTHERS
    cells = (part.to_numpy().astype("int64") if times else part).tolist()
    return ["object" if dtype == "|O" else dtype, inner(part.name), inner(cells)]


def decode(body: Any, inner: _Inner) -> Any:
    """The table behind a JSON form; raises on anything malformed."""
    import pandas as pd

    kind, index, *parts = body
    if kind == "Series":
        (one,) = parts
        series = _cells(one, inner)
        series.index, series.name = _index(index, inner), inner(one[1])
        return series
    names, *columns = parts
    frame = pd.DataFrame({number: _cells(column, inner) for number, column in enumerate(columns)})
    frame = frame if columns else pd.DataFrame(index=range(len(index[2])))
    frame.index, frame.columns = _index(index, inner), _index(names, inner)
    return frame


def _index(part: Any, inner: _Inner) -> Any:
    import pandas as pd

    return pd.Index(_cells(part, inner), name=inner(part[1]))


def _cells(part: Any, inner: _Inner) -> Any:
    import numpy as np
    import pandas as pd

    dtype, _, cells = part
    values = inner(cells)
    if dtype in _OTHERS:
        return pd.Series(values, dtype=dtype)
    if not _NUMBERS.fullmatch(dtype):
        raise ValueError("malformed table")
    return pd.Series(np.array(values, dtype="int64" if dtype[1] in "Mm" else dtype).astype(dtype))


plain.DECODERS["P"] = decode
