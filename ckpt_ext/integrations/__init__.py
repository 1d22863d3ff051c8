"""Bridges to the libraries that models come from; each module imports its library when it is first used."""

from .chain import Segments as Segments
from .report import SwapReport as SwapReport
from .swapping import swap as swap
from .swapping import unswap as unswap
