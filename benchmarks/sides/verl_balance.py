"""verl's side of `benchmarks/balance.py`: its partition of rows over ranks."""

from importlib.metadata import version

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from sides.balance_rounds import serve


def main() -> None:
    serve(get_seqlen_balanced_partitions, verl=version("verl"))


if __name__ == "__main__":
    main()
