"""What the library costs against what one would use instead: ``orthocond bench``.

`problems` says what is asked and what is true, `measure` how time and memory are taken, the four subjects (`solvers`,
`polar`, `layers`, `step`) who competes, `tables` and `page` how the results are shown. `training` is apart: what
``orthocond train`` costs against a bare loop.
"""
