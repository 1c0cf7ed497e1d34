"""Processes that run the code of users: rewards and environments, with limits on time, kills and replacements."""
