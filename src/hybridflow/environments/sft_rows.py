"""Import path kept for programs; the module is `hybridflow.environments.episodes.sft_rows`."""

from hybridflow.environments.episodes.sft_rows import EpisodeEncoder

__all__ = ["EpisodeEncoder"]
