"""hybridflow's side of `benchmarks/balance.py`: its partition of rows over ranks."""

import hybridflow
from hybridflow.algorithms import balanced_partition
from sides.balance_rounds import serve


def main() -> None:
    serve(
        lambda costs, parts, equal: balanced_partition(costs, parts, equal_counts=equal),
        hybridflow=hybridflow.__version__,
    )


if __name__ == "__main__":
    main()
