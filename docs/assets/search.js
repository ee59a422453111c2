// Search for a site that is opened from disk. There a browser lets no worker and no request read the theme's index, but a
// script may be loaded: docs/_site/offline.py writes the index as one.
if (location.protocol === "file:") {
  const base = new URL(JSON.parse(document.getElementById("__config").textContent).base + "/", location.href);
  const input = document.querySelector(".md-search__input");
  const meta = document.querySelector(".md-search-result__meta");
  const list = document.querySelector(".md-search-result__list");
  const plain = (text) => new DOMParser().parseFromString(text, "text/html").body.textContent;
  let pages = null;

  const load = () => {
    if (pages) return;
    pages = [];
    const script = document.createElement("script");
    script.src = new URL("search/pages.js", base);
    script.onload = () => {
      pages = window.searchPages.map(({ location, title, text }) => ({ location, title: plain(title), text: plain(text) }));
      show();
    };
    document.head.append(script);
  };

  // A word in a title counts most, one at the beginning of a word more than one inside; every word has to be there.
  const score = (page, words) => {
    let total = 0;
    for (const word of words) {
      const title = page.title.toLowerCase();
      const text = page.text.toLowerCase();
      const found = (title === word) * 100 + title.includes(word) * 20 + (" " + text).includes(" " + word) * 3 + text.includes(word);
      if (!found) return 0;
      total += found;
    }
    return total;
  };

  const excerpt = (text, word) => {
    const start = Math.max(0, text.toLowerCase().indexOf(word) - 60);
    return (start ? "…" : "") + text.slice(start, start + 200) + (start + 200 < text.length ? "…" : "");
  };

  const entry = (page, words) => {
    const item = document.createElement("li");
    item.className = "md-search-result__item";
    const link = document.createElement("a");
    link.className = "md-search-result__link";
    link.href = new URL(page.location, base);
    const article = document.createElement("article");
    article.className = "md-search-result__article md-typeset";
    const title = document.createElement("h2");
    title.textContent = page.title;
    const text = document.createElement("p");
    text.textContent = excerpt(page.text, words[0]);
    article.append(title, text);
    link.append(article);
    item.append(link);
    return item;
  };

  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length
      ? pages.map((page) => [score(page, words), page]).filter(([points]) => points).sort((a, b) => b[0] - a[0])
      : [];
    meta.textContent = words.length ? `${found.length} matching section${found.length === 1 ? "" : "s"}` : "Type to search";
    list.replaceChildren(...found.slice(0, 40).map(([, page]) => entry(page, words)));
  };

  // The theme hides its search where it has no worker.
  document.querySelector(".md-search").hidden = false;
  const toggle = document.getElementById("__search");
  input.addEventListener("focus", () => { toggle.checked = true; load(); });
  input.addEventListener("keydown", (event) => { if (event.key === "Escape") { toggle.checked = false; input.blur(); } });
  toggle.addEventListener("change", () => { if (toggle.checked) input.focus(); });
  input.addEventListener("input", () => { load(); show(); });
}
