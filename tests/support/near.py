"""Numbers that may differ by an absolute limit alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_near(found: Any, wanted: Any, most: float, note: str = "") -> None:
    """No number is further than `most` from the wanted one."""
    __tracebackhide__ = True
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=most, rtol=0, err_msg=note)
