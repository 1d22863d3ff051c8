"""Settings that must stand before the first kernel is defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"
