"""Upload of an exported model to the Hugging Face hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridflow.errors import CheckpointConfigError, CheckpointError
from hybridflow.models.hub.download import first_line, timeouts
from hybridflow.models.hub.names import REPOSITORY

TIMEOUT_S = 600.0
"""Time after which a request without an answer fails; a commit of many large files may take minutes."""


def require_upload(repository: str, *, private: bool = False) -> None:
    """Create the repository of a model unless it exists: what fails later than an export fails here already.

    Raises CheckpointConfigError for a name that is not OWNER/NAME, without a token, and without the right to write.
    """
    from huggingface_hub import HfApi, constants, get_token

    if not re.fullmatch(REPOSITORY, repository):
        raise CheckpointConfigError(f"--push-to-hub '{repository}' is invalid: expected OWNER/NAME.")
    if constants.HF_HUB_OFFLINE:
        raise CheckpointConfigError(
            f"--push-to-hub '{repository}': HF_HUB_OFFLINE is set; unset it, or leave --push-to-hub out."
        )
    if get_token() is None:
        raise CheckpointConfigError(
            f"--push-to-hub '{repository}' needs a token of the hub; log in with `hf auth login`, or set HF_TOKEN."
        )
    with _explained(f"'{repository}' cannot be created on {constants.ENDPOINT}", CheckpointConfigError):
        HfApi().create_repo(repository, private=private, exist_ok=True)


def upload_model(directory: Path, repository: str) -> str:
    """Upload all files of an exported model in one commit, and return its address.

    Raises CheckpointError if that fails; the directory stays as it is.
    """
    from huggingface_hub import HfApi, constants

    again = f"`hf upload {repository} {directory}` tries again"
    what = f"'{directory}' is complete, but was not uploaded to '{repository}'; {again}"
    with _explained(what, CheckpointError):
        HfApi().upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload of hybridflow export")
    return f"{constants.ENDPOINT}/{repository}"


@contextmanager
def _explained(what: str, error_type: type[CheckpointError]) -> Iterator[None]:
    from httpx2 import HTTPError

    try:
        with timeouts(TIMEOUT_S):
            yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:  # the last two: of a card and of a large file
        status = getattr(getattr(error, "response", None), "status_code", None)
        hint = "; the token has no right to write there" if status in (401, 403) else ""
        raise error_type(f"{what}: {first_line(error)}{hint}.") from error
