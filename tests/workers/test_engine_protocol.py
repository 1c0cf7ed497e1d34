"""Workers build an engine in one place, as a `TrainEngine`, so that pyright allows only names of the Protocol."""

import re
from pathlib import Path

import hybridflow

SOURCE = Path(hybridflow.__file__).parent


def test_two_lines_name_the_torch_engine_of_workers_and_of_the_family_check():
    naming = {
        str(file.relative_to(SOURCE)): len(re.findall(r"\bTorchEngine\(", file.read_text(encoding="utf-8")))
        for package in ("workers", "trainers", "cli", "rollout", "weight_sync")
        for file in sorted((SOURCE / package).rglob("*.py"))
        if "TorchEngine" in file.read_text(encoding="utf-8")
    }
    assert naming == {"workers/model_worker.py": 1, "trainers/family_check/layouts.py": 1}
