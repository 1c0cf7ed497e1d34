"""Metrics of episodes: turns, tools, and why episodes end."""

from hybridflow.observability.glossary.metric import Metric, spread_of

EPISODES = {
    **spread_of("episode/turns", "Turns of the model in an episode", "count"),
    "episode/tool_calls": Metric(
        "Calls of tools in an episode: mean.", "count", worry="Falls to 0: the model has unlearned its tools."
    ),
    "episode/tool_error_rate": Metric(
        "Share of the calls that named no tool, had wrong arguments, failed or took too long; 0 without calls.",
        "1",
        worry="Stays above 0.5: the model does not learn the form of a call, or the tools are broken; see the samples.",
    ),
    "episode/ended_done": Metric("Share of episodes that their environment, or a turn without a call, ended.", "1"),
    "episode/ended_turns": Metric(
        "Share that environment.max_turns ended.", "1", worry="Above 0.3: the model calls without an end."
    ),
    "episode/ended_tokens": Metric(
        "Share that data.max_response_length ended, or data.max_prompt_length with it.",
        "1",
        worry="Above 0.3: episodes need more tokens than they may have.",
    ),
    "episode/ended_seconds": Metric(
        "Share that environment.max_seconds ended.", "1", worry="Above 0: tools or generation are too slow."
    ),
    "episode/ended_rows": Metric(
        "Share that ended since the template changed earlier turns and no row was left.",
        "1",
        worry="Above 0.05: raise environment.max_rows.",
    ),
    "episode/ended_error": Metric(
        "Share that a failure of the environment ended; also in reward/error_rate or reward/timeout_rate.",
        "1",
        worry="Above 0.05: the environment is broken; the log has the first failure of a step.",
    ),
}
