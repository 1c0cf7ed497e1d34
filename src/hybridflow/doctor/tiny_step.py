"""A step of GRPO on a model of 10,000 weights, made on the spot, locally and on Ray: `python -m ... DIRECTORY`."""

import sys
from pathlib import Path

LOCAL_DONE = "local_done"
"""The file that tells that the local step was made."""

REWARD = "def score(solution_str, **_):\n    return len(set(solution_str)) / 10\n"


def main(directory: Path) -> None:
    """Write the task and make its step on each backend; raises what goes wrong."""
    from hybridflow.config import load_config
    from hybridflow.data import prompt_row, write_prompt_file
    from hybridflow.doctor.tiny_model import write_model
    from hybridflow.trainers import build_trainer

    write_model(directory / "model")
    (directory / "reward.py").write_text(REWARD)
    rows = [
        prompt_row(data_source="doctor", prompt=f"{a} {b}", ground_truth="", split="train", index=i)
        for i, (a, b) in enumerate(("ab", "cd"))
    ]
    file = write_prompt_file(directory / "train.parquet", rows)
    for backend in ("local", "ray"):
        changes = [
            *(f"model.path={directory}/model", f"data.train_files=['{file}']", "data.train_batch_size=2"),
            *("data.max_prompt_length=4", "data.max_response_length=4", "rollout.group_size=2"),
            *(f"reward.function={directory}/reward.py:score", f"controller.backend={backend}", "controller.threads=1"),
            *("trainer.total_steps=1", f"trainer.run_dir={directory}/{backend}"),
        ]
        with build_trainer(load_config(None, changes)) as trainer:
            trainer.fit()
        if backend == "local":
            (directory / LOCAL_DONE).touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
