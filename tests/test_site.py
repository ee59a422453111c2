"""The site in a browser: the search of a site that is opened from disk."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

ROOT = Path(__file__).parents[1]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
CONFIG = """
site_name: small
use_directory_urls: false
theme: {name: material, font: false}
plugins: [search]
extra_javascript: [assets/search.js]
hooks: [ROOT/docs/_site/offline.py]
"""


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no browser: install chromium and chromium-driver")
def test_the_search_works_from_disk(tmp_path):
    pages = tmp_path / "docs" / "guides"
    pages.mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text("# First\n\nNothing to be found here.\n")
    (pages / "whitening.md").write_text(
        "# Whitening\n\nThe null space is dropped.\n\n## Rank\n\nIt counts eigenvalues.\n"
    )
    (tmp_path / "docs" / "assets").mkdir()
    shutil.copy(ROOT / "docs" / "assets" / "search.js", tmp_path / "docs" / "assets")
    (tmp_path / "mkdocs.yml").write_text(CONFIG.replace("ROOT", str(ROOT)))
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q"], cwd=tmp_path, env=environment, check=True, timeout=100
    )
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run"):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        driver.set_window_size(1300, 800)
        driver.get((tmp_path / "site" / "guides" / "whitening.html").as_uri())
        driver.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("null space")
        for _ in range(50):
            found = driver.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
            if found:
                break
            time.sleep(0.1)
        assert [link.text.split("\n")[0] for link in found] == ["Whitening"]
        assert driver.find_element(By.CSS_SELECTOR, ".md-search-result__meta").text == "1 matching section"
        driver.get(found[0].get_attribute("href"))
        for _ in range(50):  # the page may still be loading
            if "The null space is dropped." in driver.page_source:
                break
            time.sleep(0.1)
        assert "The null space is dropped." in driver.page_source
    finally:
        driver.quit()
