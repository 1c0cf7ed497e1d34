import pytest

from hybridflow.cli.main import main


@pytest.fixture
def shown(capsys):
    """Return `shown(*arguments, status=0)`, which runs a command and returns what it prints on stdout and stderr."""

    def run(*arguments, status=0):
        try:
            found = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            found = exit_.code
        assert found == status
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run
