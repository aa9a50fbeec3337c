/* What Sphinx's search calls for each result: site_search.py names sections "page#anchor" as if they were pages. */
const afterGuides = new Set(["changelog", "packages"]);

Scorer.score = (result) => {
  const [page, section] = result[0].split("#");
  if (section) {
    result[0] = page;
    result[2] ||= "#" + section;
    if (result[6] === SearchResultKind.title) // Sphinx adds the section's title, which is there already
      result[1] = result[1].slice(0, result[1].lastIndexOf(" > "));
  }
  return afterGuides.has(page) ? result[4] - 1 : result[4];
};

Documentation.TRANSLATIONS["Search finished, found one page matching the search query."] = [
  "One section found.",
  "${resultCount} sections found.",
];
