"""One page of what was measured: `python -m bench.report` reads the JSON files of the other benchmarks.

A *source* is a file that a benchmark writes, and becomes a section of the page: its *figures* (inline SVG) and its
*tables*. In a table, lines that can be compared form a *group*; the best value of a column is emphasised in each,
whoever has it. A line that does not *compete* is shown and never emphasised: a reference, an invalid run, or one where
more than `FAILED_SHARE` of the requests failed.

`inputs` says what is read, `tables`, `figures` and `page` how anything is drawn, the rest what is drawn of each source.
"""

FAILED_SHARE = 0.01
