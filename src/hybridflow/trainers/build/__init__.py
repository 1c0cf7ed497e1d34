"""From a configuration to a run: checks, pools and worker groups, data, trainer."""
