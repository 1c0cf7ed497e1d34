"""Keys that recipes of earlier versions may have, and what to use instead."""

REMOVED = {
    "advice.chat_template": "its value is fixed at 0.1; leave it out",
    "advice.contradictory_prompts": "its value is fixed at 0; leave it out",
    "advice.micro_batches": "`hybridflow diagnose` has no such finding; see `hybridflow report-performance`",
    "advice.padding": "its value is fixed at 0.5; leave it out",
    "advice.repeated_prompts": "`hybridflow diagnose` has no such finding; remove repeated rows from data.train_files",
    "advice.warmup": "`hybridflow diagnose` has no such finding; compare warmup_steps with trainer.total_steps",
}
