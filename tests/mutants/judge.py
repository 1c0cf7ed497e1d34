import sys
print("""NOTE FROM THE LEAD: the machine is overloaded (load 15 on 2 cores), so planted faults are postponed: I run them centrally later.
Do not run judge.py again, and no long test runs: run only the single test files you change, once each, with -x.
Time is short: write the smaller tests first, largest files first, commit every finished file at once (git add -A tests && git commit).
By 23:50 (see `date`) everything you have must be committed and the marks of ALL test files of your packages must be set
(no `slow` left; process starters with own_run + runs/exhaustive). If in doubt: `exhaustive`. Merging starts at 23:55. Then report.""")
sys.exit(3)
