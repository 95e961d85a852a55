"""One page of results: `python -m bench.report` reads the JSON files of the other benchmarks.

A *source* is a file that a benchmark writes. It becomes a section of the page with *figures* (inline SVG) and *tables*.
Comparable lines of a table form a *group*. In each group, the best value of a column is emphasised, whoever has it.
A line that does not *compete* is shown and never emphasised: a reference, an invalid run, or a line with more than
`FAILED_SHARE` failed requests.

`inputs` reads the files. `tables`, `figures` and `page` draw. Every other module draws one source.
"""

FAILED_SHARE = 0.01
