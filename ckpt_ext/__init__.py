"""A recompute engine for training transformers: blocks keep only their input, and backward rebuilds the rest."""



from . import functional as functional
from . import rng as rng
from .checkpoint import checkpoint as checkpoint
from .masks import AttentionMask as AttentionMask
from .masks import attention_mask as attention_mask
from .modules import EagerBlock as EagerBlock
from .modules import TransformerBlock as TransformerBlock
from .sequential import checkpoint_sequential as checkpoint_sequential
from .spec import BlockSpec as BlockSpec
from .spec import Policy as Policy


