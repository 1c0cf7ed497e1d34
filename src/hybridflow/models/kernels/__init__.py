"""Fused CPU kernels, compiled on first use with the machine's C compiler; PyTorch computes the same without them.

They operate on tensors and do not know models: the parts of a decoder that are worth fusing, forward and backward. On a
CUDA device, generation uses Triton kernels for some of them; `fused_log_probs` is for training there, by torch.compile.
"""

from hybridflow.models.kernels.attention import append_and_attend, causal_attention
from hybridflow.models.kernels.decoder import Decoder, DecoderLayer, PackedLinear
from hybridflow.models.kernels.elementwise import rms_norm, rotary, silu_mul
from hybridflow.models.kernels.fused_log_probs import fused_log_probs
from hybridflow.models.kernels.library import serves, serves_words, sum_words, use_kernels
from hybridflow.models.kernels.sampling import draw

__all__ = [
    "Decoder",
    "DecoderLayer",
    "PackedLinear",
    "append_and_attend",
    "causal_attention",
    "draw",
    "fused_log_probs",
    "rms_norm",
    "rotary",
    "serves",
    "serves_words",
    "silu_mul",
    "sum_words",
    "use_kernels",
]
