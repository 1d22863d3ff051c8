"""A recompute engine for training transformers: blocks keep only their input, and backward rebuilds the rest."""



from . import functional as functional
from . import rng as rng
from .modules import EagerBlock as EagerBlock
from .modules import TransformerBlock as TransformerBlock
from .spec import BlockSpec as BlockSpec
from .spec import Policy as Policy


