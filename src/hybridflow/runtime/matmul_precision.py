"""The precision of float32 matrix products."""


def use_full_float32() -> None:
    """Compute float32 matrix products in float32 on every device, never in TF32, whose mantissa has 10 bits.

    A run that wants the speed of tensor cores computes in bfloat16 (`model.dtype`); what stays float32 there, such as
    rotary angles, needs the precision: TF32 would round positions above 2,048. It also undoes TF32 that a library or
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE enabled.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
