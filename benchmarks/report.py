"""The page of a run of 100,000 responses, of which 2,000 keep their tokens, and what it costs a run to keep its files.

open    seconds from the request for the file until its first curve is drawn, in headless Chromium
filter  milliseconds from a filter's change until the table shows the responses that pass it, the median of changes
size    MB of the file
cost    share of a step's processor time that goes into metrics, trace and samples, on a model of 3 million weights

make bench-report
"""

import shutil
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from support.arguments import parser_of, positive
from support.echo_task import write_task
from support.environments import ROOT
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows

from hybridflow.cli.inspect.report import write_report
from hybridflow.config import load_config
from hybridflow.runtime.observe.run_files import RunFiles
from hybridflow.trainers import build_trainer
from hybridflow.trainers.run import ppo_trainer
from hybridflow.trainers.run.run_log import RunLog

sys.path.append(str(ROOT / "tests"))
from fixtures.report_runs import write_run

OPEN_S, FILTER_MS, SIZE_MB, COST = 3.0, 200.0, 60.0, 0.01
"""The limits."""

CHARACTERS = 1200
"""Characters of a kept response."""

MODEL = ["data.train_batch_size=16", "rollout.group_size=4", "data.max_response_length=64", "trainer.log_samples=4"]


def main() -> None:
    parser = parser_of(__doc__, None, smoke={"responses": 1000, "steps": 2})
    parser.add_argument("--responses", type=positive, default=100_000, metavar="N", help="default: 100000")
    parser.add_argument("--steps", type=positive, default=6, metavar="N", help="steps whose cost is measured")
    args = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None and not args.smoke:
        raise BenchmarkError("chromium is not found; install it: apt-get install chromium")
    with tempfile.TemporaryDirectory() as directory:
        steps = max(1, args.responses // 500)
        file = written_report(Path(directory), steps)
        rows = [Row("size", "MB", file.stat().st_size / 1e6, limit=SIZE_MB)]
        if chromium is not None:
            rows = [*opened(file, chromium), *rows]
        rows.append(Row("cost", "1", share_of_logs(Path(directory) / "task", args.steps), limit=COST))
    print_rows(
        "report",
        [Row(row.name, row.unit, row.ours, None, row.limit, (row.limit or 0) / row.ours) for row in rows],
        smoke=args.smoke,
    )


def written_report(directory: Path, steps: int) -> Path:
    """Write a run of 500 responses a step, 10 of them with tokens, and its page; return the file."""
    texts = [f"response {i}: " + f"the sum of {i} and {7 * i} is {8 * i}. " * (CHARACTERS // 32) for i in range(50)]
    path = write_run(directory / "run", steps=steps, rows=500, kept=10, texts=texts)
    start = time.perf_counter()
    write_report([RunFiles(path)], directory / "report.html")
    print(f"written in {time.perf_counter() - start:.1f} s")
    return directory / "report.html"


def opened(file: Path, chromium: str) -> list[Row]:
    """Return how long the page takes to open and to filter."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        open_s = []
        for _ in range(3):
            page = browser.new_page()
            start = time.perf_counter()
            page.goto(file.as_uri())
            page.wait_for_selector("main canvas")
            open_s.append(time.perf_counter() - start)
        page.click("#tab-rollouts")
        page.wait_for_selector("#responses")
        filter_ms = page.evaluate(FILTERS)
        browser.close()
    return [
        Row("open", "s", statistics.median(open_s), limit=OPEN_S),
        Row("filter", "ms", statistics.median(filter_ms), limit=FILTER_MS),
    ]


FILTERS = """
async () => {
  const count = document.querySelector("#count"), input = document.querySelector("[aria-label='score from']");
  const milliseconds = [];
  for (const low of ["0.9", "0.5", "0.99", "0.1", "0.7", "0.3", "0.95"]) {
    const start = performance.now();
    const changed = new Promise((done) => {
      const observer = new MutationObserver(() => { observer.disconnect(); done(); });
      observer.observe(count, { childList: true });
    });
    input.value = low;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    await changed;
    await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn, 0)));
    milliseconds.push(performance.now() - start);
  }
  return milliseconds;
}
"""
"""Seven filters one after another; each time includes the wait of 60 ms for the next key."""


def share_of_logs(directory: Path, steps: int) -> float:
    """Return the share of the processor time of a run that its logs take."""
    directory.mkdir()
    write_task(directory)
    write_larger_model(directory / "model")
    changes = [*MODEL, f"trainer.total_steps={steps}", f"trainer.run_dir={directory}/run", "controller.threads=1"]
    config = load_config(directory / "task.toml", changes)
    spent: list[float] = []

    def timed(function):
        def call(*args, **kwargs):
            start = time.process_time()
            result = function(*args, **kwargs)
            spent.append(time.process_time() - start)
            return result

        return call

    samples_of, write = ppo_trainer.samples_of, RunLog.write
    ppo_trainer.samples_of, RunLog.write = timed(samples_of), timed(write)
    try:
        with build_trainer(config) as trainer, redirect_stdout(StringIO()):
            start = time.process_time()
            trainer.fit()
            return sum(spent) / (time.process_time() - start)
    finally:
        ppo_trainer.samples_of, RunLog.write = samples_of, write


def write_larger_model(directory: Path) -> None:
    """Replace the task's model by one of 3 million weights."""
    import runpy

    task = runpy.run_path(str(ROOT / "examples" / "countdown_task.py"))
    shutil.rmtree(directory)
    torch.manual_seed(0)
    task["write_model"](directory, seed=0, width=256, layers=4, heads=4)


if __name__ == "__main__":
    run(main)
