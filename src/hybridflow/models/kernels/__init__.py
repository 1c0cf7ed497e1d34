"""Fused CPU kernels, compiled on first use with the machine's C compiler; PyTorch computes the same without them.

They operate on tensors and do not know models: the parts of a decoder that are worth fusing, forward and backward. On a
CUDA device, generation uses Triton kernels for some of them; `fused_log_probs` is for training there, by torch.compile.
"""
