// What the theme leaves out for readers with a keyboard or a screen reader.
new MutationObserver(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) table.tabIndex = 0;
  for (const buttons of document.querySelectorAll(".md-code__nav:not([role])")) buttons.setAttribute("role", "none");
  for (const part of document.querySelectorAll(".md-nav[aria-labelledby]:has(> .md-nav__title)")) {
    part.setAttribute("aria-label", part.querySelector(".md-nav__title").textContent.trim());
    part.removeAttribute("aria-labelledby");
  }
}).observe(document.body, { childList: true, subtree: true });
