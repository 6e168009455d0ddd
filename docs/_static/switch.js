// Fills the list of versions from ../versions.js, which lies beside all of them and is a script
// rather than JSON so that it can be read without a server.
window.addEventListener("DOMContentLoaded", () => {
  const list = document.getElementById("site-version");
  const versions = window.siteVersions || [];
  if (!list || versions.length === 0) return;
  const here = list.dataset.version;
  list.replaceChildren(...versions.map((name) => new Option(name, name, false, name === here)));
  list.disabled = versions.length < 2;
  const root = new URL(document.documentElement.dataset.content_root, document.baseURI);
  list.addEventListener("change", () => {
    location.href = new URL(`../${list.value}/docs/index.html`, root).href;
  });
});
