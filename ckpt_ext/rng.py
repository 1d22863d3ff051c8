"""Stub."""
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Site(IntEnum):
    ATTENTION = 1
    ATTENTION_RESIDUAL = 2
    MLP = 3
    MLP_RESIDUAL = 4
    FUNCTIONAL = 5


@dataclass(frozen=True, slots=True)
class Dropout:
    state: Tensor
    p: float
    site: int
