"""What the library costs, compared with the alternatives: ``orthocond bench``.

`problems` has the test matrices and their reference results, `measure` takes time and memory, each subject (`solvers`,
`functions`, `polar`, `geometry`, `layers`, `step`) has its contestants, `tables` and `page` show the results.
`training` is separate: it compares ``orthocond train`` with a bare loop.
"""
