"""Models and data sets of the Hugging Face hub: names, downloads into its cache, and uploads.

A configuration may name a model `OWNER/NAME` or `OWNER/NAME@REVISION`, and a file
`hf://datasets/OWNER/NAME[@REVISION]/PATH`. A run works with the copies in the cache, and records names with the exact
revision, so that it continues with the same files.
"""

from hybridflow.models.hub.local_config import local_file, local_model, with_local_files, with_names
from hybridflow.models.hub.names import FileName, ModelName, name_of
from hybridflow.models.hub.upload import require_upload, upload_model

__all__ = [
    "FileName",
    "ModelName",
    "local_file",
    "local_model",
    "name_of",
    "require_upload",
    "upload_model",
    "with_local_files",
    "with_names",
]
