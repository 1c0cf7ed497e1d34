"""The number of rows that episodes may have, from what the chat template does with earlier turns."""

from hybridflow.config import Config, check
from hybridflow.data import load_tokenizer, stop_token_ids
from hybridflow.environments import check_template
from hybridflow.errors import EnvironmentConfigError
from hybridflow.observability import get_logger

logger = get_logger(__name__)


def settle_rows(config: Config) -> Config:
    """Return the configuration with the number of rows that environment.max_rows = 0 stands for.

    Raises EnvironmentConfigError for a chat template that cannot serve episodes, ConfigError for keys that do not go
    with episodes of several rows.
    """
    environment = config.environment
    if not environment.classes:
        return config
    tokenizer = load_tokenizer(config.model.path)
    findings = check_template(tokenizer, stop_token_ids(tokenizer, config.model.path))
    if failed := [each for each in findings if each.state == "failed" and each.check != "tools"]:
        raise EnvironmentConfigError(
            f"the chat template of model.path='{config.model.path}' cannot serve episodes: {failed[0].check}: "
            f"{failed[0].detail}. `hybridflow check-template {config.model.path}` shows all checks."
        )
    if environment.max_rows:
        return config
    changing = [each.check for each in findings if each.state == "rows"]
    rows = environment.max_turns if changing else 1
    if changing:
        logger.info(
            "the chat template changes earlier turns (%s), so that an episode may have %d rows of tokens",
            ", ".join(changing),
            rows,
        )
    settled = config.model_copy(update={"environment": environment.model_copy(update={"max_rows": rows})})
    check(settled)
    return settled
