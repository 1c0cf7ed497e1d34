"""Metrics of time, throughput, balance, transfers, memory and recovery."""

from hybridflow.observability.glossary.metric import LIMITS, MANY_MICRO_BATCHES, Metric

SPEED = {
    "timing_s/queue_wait": Metric(
        "trainer.lag: time between the end of generation of the step's batch and the step; 0 if the step waited for "
        "it; absent for a batch restored from a checkpoint.",
        "s",
        "max",
        "Longer than timing_s/step: generation is faster than training, and samples age; lower trainer.lag.",
    ),
    "timing_s/<stage>": Metric(
        "Time of a stage: step, weight_sync (between pools with the wait for running generation), gen, reward, "
        "old_log_probs, ref_log_probs, teacher, values, update_critic, update_actor, update_sft, update_dpo, "
        "compute_scores, update_reward_model, validation; for a call, the time in which at least one rank ran it.",
        "s",
        "max",
        "Twice its median at equal lengths: a slow rank, or other work on the machine. reward above a tenth of step: "
        "more reward.processes. weight_sync above a tenth of step: see rollout.weight_sync.",
    ),
    "timing_per_token_ms/<stage>": Metric(
        "Time of a stage per token that it processed.", "ms/token", "max", "Rises over steps: see timing_s/<stage>."
    ),
    "parts/<stage>": Metric(
        'Smallest part of the rows in a stage, relative to an equal one (controller.parts = "measured"); 1: all equal.',
        "1",
        worry="Below 0.5: a rank is half as fast as the others.",
    ),
    "processes/<pool>": Metric(
        "Number of processes of a pool whose size may change (placement.min_processes).",
        "count",
        worry="Below the configured size: a node is lost, and steps take longer.",
    ),
    "balance/imbalance_before": Metric(
        "Relative extra time of the slowest rank if rows kept the order of generation: max / mean - 1 of the model's "
        "cost, mean over mini-batches or, with trainer.stream, over parts.",
        "1",
    ),
    "balance/imbalance_after": Metric(
        "The same for the order of rows after balancing (controller.balance).",
        "1",
        worry="Above 0.1: too few rows for each rank to even out their lengths.",
    ),
    "perf/num_tokens": Metric(
        "Tokens of prompts and responses in the step.",
        "tokens",
        "sum",
        f"More than {MANY_MICRO_BATCHES} times memory.max_tokens_per_micro_batch for an optimizer step and rank: the "
        "token budget is too small.",
    ),
    "perf/tokens_per_s": Metric(
        "perf/num_tokens divided by timing_s/step.",
        "tokens/s",
        "sum",
        "Falls by half at equal lengths: see timing_s/<stage>.",
    ),
    "perf/tokens_per_s_per_device": Metric(
        "perf/tokens_per_s divided by the number of devices: the ranks of all pools with a model, training and "
        "generating, each rank counted once for all its roles; on Ray times controller.gpus_per_worker.",
        "tokens/s",
        worry="Falls as devices are added: they wait; see perf/<role>_idle_share.",
    ),
    "perf/<stage>_tokens_per_s": Metric(
        "Tokens that a stage processed divided by its time: response tokens for gen, all tokens for the others.",
        "tokens/s",
        "sum",
    ),
    "perf/<role>_idle_share": Metric(
        "Share of the step's time in which the processes of a role ran no call; the roles of a pool share its "
        "processes. On the local backend the ranks take turns, so that each waits for the others.",
        "1",
        worry=f"Above {LIMITS.idle}: the pool is too large, or waits for another; see trainer.lag and trainer.stream.",
    ),
    "perf/<role>_compilations": Metric(
        "Graphs that torch.compile compiled in a role's processes since its last update: 0 after the first steps, as "
        "one graph serves all numbers of tokens; 0 without model.compile.",
        "count",
        "max",
        "Above 0 after the first 3 steps: it compiles again and again, up to a minute each time.",
    ),
    "mfu/<role>": Metric(
        "Model FLOPs utilization of a role's update (mfu/gen: of generation): model FLOPs, attention included and a "
        "prompt counted once for its group, as a share of the matrix-product peak of the role's ranks together, each "
        "measured on its device when the run starts (matmul_peak_flops_per_s in run.json). Null above 1: the peak was "
        "measured under load.",
        "1",
        worry="An update below 0.2 on a GPU with a model of 0.5B parameters or more: micro-batches are too small, "
        "padding or offload. Generation is always lower.",
    ),
    "transfer/bytes_flowed": Metric("Data of batches that workers read and wrote.", "bytes", "sum"),
    "transfer/bytes_sent": Metric("Data of batches that the controller sent.", "bytes", "sum"),
    "transfer/bytes_read": Metric("Data of batches that the controller read.", "bytes", "sum"),
    "transfer/seconds": Metric(
        "Time of packing, unpacking, sending and reading, summed over processes.",
        "s",
        "sum",
        "Above a tenth of timing_s/step times the processes: transfers are slow; see report-performance.",
    ),
    "recovery/failures": Metric(
        "Failures since the last row that the run recovered from.",
        "count",
        "sum",
        "Above 0 in several rows: a node is faulty; see recoveries.jsonl.",
    ),
    "recovery/repeated_steps": Metric(
        "Completed steps that were repeated after these failures.",
        "steps",
        "sum",
        "Above 1: save or snapshot more often.",
    ),
    "recovery/time_s": Metric("Time from these failures until the run could go on.", "s", "sum"),
    "recovery/slow_ranks": Metric(
        "Ranks found much slower than their peers; only in the row of a slow step after which ranks were measured.",
        "count",
        "sum",
        "Above 0: the log names the rank; its machine is hot, shared or faulty.",
    ),
    "memory_bytes/<kind>": Metric(
        "Memory of the controller's process: resident, peak_resident; on CUDA cuda_allocated, cuda_reserved, ...",
        "bytes",
        "max",
        "resident rises for 100 steps at equal lengths: a leak. peak_resident above 0.9 of the machine's memory: the "
        "process may be killed.",
    ),
}
