"""The notebooks run without a warning and show what they promise; jupytext reads them."""

import re

import jupytext
import pytest

from notebooks import SOURCES, as_markdown

PICTURES = {"colour": 5, "nan": 2, "pooling": 2, "spectrum": 3}
SENTENCES = {
    "colour": "step 8: loss 0.0",  # the gradient finds a style that begins with a singular covariance
    "nan": "ill-posed - consistent: False",
    "pooling": "as usually written: False",
    "spectrum": "<th>cond_support</th>",
}


def test_every_notebook_has_a_page_and_is_tested():
    assert {source.stem for source in SOURCES} == set(PICTURES)
    for source in SOURCES:
        assert f"{{{{ notebook {source.stem} }}}}" in source.with_suffix(".md").read_text()
        cells = jupytext.read(source).cells
        assert cells[0].cell_type == "markdown"


@pytest.mark.filterwarnings("default")  # the notebooks make theirs errors
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_notebooks_run(source):
    markdown = as_markdown(source)
    assert markdown.count('<img class="output"') == PICTURES[source.stem]
    assert SENTENCES[source.stem] in markdown
    if source.stem == "pooling":
        shares = [int(share) for share in re.findall(r"pooling +(\d+)% of", markdown)]
        assert shares == sorted(shares)  # the average first
