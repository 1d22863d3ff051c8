"""What a launcher needs to know of dropout.

A `dropout` argument is None or any object with `state` (int64 tensor `[2]`: seed, offset), `p` (float in (0, 1]), `site` (int in 1..255),
`row_start` (int: the mask's row of the first row of data) and `batch_rows` (int or None: attention over some of the heads has this many
rows of the mask from one batch entry to the next).
"""


def dropout_constants(dropout) -> dict:
    """The compile-time arguments SITE, THRESHOLD, DROPOUT_SCALE and HAS_DROPOUT of a kernel with `dropout`."""
    if dropout is None:
        return {"HAS_DROPOUT": False, "SITE": 0, "THRESHOLD": 0, "DROPOUT_SCALE": 1.0}
    scale = 0.0 if dropout.p == 1 else 1 / (1 - dropout.p)
    return {"HAS_DROPOUT": True, "SITE": int(dropout.site), "THRESHOLD": round(dropout.p * 2**32), "DROPOUT_SCALE": scale}


def dropout_state(dropout):
    """The state tensor to pass as `state_ptr`, or None."""
    return None if dropout is None else dropout.state


def dropout_row_start(dropout) -> int:
    """The mask's row of the first row of data."""
    return 0 if dropout is None else dropout.row_start


def dropout_batch_rows(dropout, rows: int) -> int:
    """Rows of an attention's mask from one batch entry to the next, where the entry has `rows` rows of data."""
    return rows if dropout is None or dropout.batch_rows is None else dropout.batch_rows
