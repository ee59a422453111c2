"""The study's tables and pictures: python results/study/publish.py, from the files beside this one to docs/.

A table in a page stands between `<!-- table NAME -->` and `<!-- end -->`, and is rewritten; the text around it is
written by hand.
"""

from charts import draw_errors, draw_gauged, draw_published, draw_published_errors, draw_spectrum, draw_treated
from records import HERE, read
from tables import with_tables

DOCS = HERE.parents[1] / "docs"
PAGES = ("results.md", "study.md", "gauge.md")


def publish() -> None:
    runs, curves = read("runs"), read("curves")
    for page in (DOCS / name for name in PAGES):
        page.write_text(with_tables(page.read_text(), runs))
    draw_gauged(curves, DOCS / "gauge.png")
    draw_treated(curves, DOCS / "conditions.png")
    draw_errors(runs, DOCS / "results.png")
    draw_published(read("published_curves"), DOCS / "published_conditions.png")
    draw_published_errors(read("published"), DOCS / "published.png")
    draw_spectrum(read("spectrum"), DOCS / "spectrum.png")


if __name__ == "__main__":
    publish()
