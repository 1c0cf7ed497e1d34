"""The choice of a model's forward pass: the fused one, also with exact log-probs, or the model's own code."""

from transformers import PreTrainedModel

from hybridflow.errors import ModelConfigError
from hybridflow.models.exact_forward import ExactForward, require_exact
from hybridflow.models.forward import Forward, OwnForward
from hybridflow.models.fused_forward import FusedForward, is_fusable
from hybridflow.models.routes import RecordingForward
from hybridflow.models.tensor_parallel import TensorRanks
from hybridflow.models.varlen import packed_kernel


def forward_of(
    model: PreTrainedModel,
    *,
    is_sharded: bool = False,
    tensor: TensorRanks | None = None,
    records_routes: bool = False,
    exact: bool = False,
) -> Forward:
    """Return the fused forward pass if the model's family has one, otherwise the model's code.

    `is_sharded`: FSDP2 gathers the weights in hooks of the modules, so these are called as modules. `tensor`: the
    tensor parallel ranks. `records_routes`: it is a mixture of experts, whose routes are recorded. `exact`: results for
    a token have the same bits in each batch and layout, in training and in decoding. Raises ModelError if `tensor` is
    given for a family without a fused pass, and if `exact` cannot be had.
    """
    if model.device.type == "cuda":
        packed_kernel()  # an error before the first step
    if exact:
        require_exact(model, tensor)
    if is_fusable(model):
        return (ExactForward if exact else FusedForward)(model, is_sharded=is_sharded, tensor=tensor)
    if tensor is not None:
        raise ModelConfigError(
            f"parallel.tensor > 1 is not supported for this {model.config.model_type} model; use parallel.tensor = 1."
        )
    return RecordingForward(model) if records_routes else OwnForward(model)
