() => {
  const faults = [];
  const words = (element) => (element.textContent || "").trim().slice(0, 40);
  const isShown = (element) => element.checkVisibility();

  const root = document.scrollingElement;
  if (root.scrollWidth > root.clientWidth) {
    faults.push(`is ${root.scrollWidth} wide in a window of ${root.clientWidth}`);
  }
  if (!document.title) faults.push("has no title");
  if (!document.documentElement.lang) faults.push("does not say its language");

  for (const picture of document.querySelectorAll("img, svg")) {
    if (!isShown(picture)) continue;
    const box = picture.getBoundingClientRect();
    const name = picture.id || picture.alt || picture.querySelector("title")?.textContent || "?";
    if (!(box.width > 0 && box.height > 0)) faults.push(`picture ${name} is not seen`);
    if (picture.tagName === "IMG") {
      if (!(picture.naturalWidth > 0)) faults.push(`picture ${name} was not loaded`);
      if (!picture.hasAttribute("alt")) faults.push(`picture ${picture.src} has no alt`);
    } else if (picture.getAttribute("role") === "img" && !picture.querySelector("title")) {
      faults.push(`picture ${name} has no title`);
    }
  }
  for (const figure of document.querySelectorAll("figure")) {
    if (![...figure.querySelectorAll("img, svg")].some(isShown)) faults.push("a figure is empty");
  }

  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const found = Number(heading.tagName[1]);
    if (found > level + 1) faults.push(`heading "${words(heading)}" skips a level`);
    level = found;
  }
  const first = document.querySelectorAll("h1").length;
  if (first !== 1) faults.push(`has ${first} headings of the first level`);

  const ids = new Set();
  for (const element of document.querySelectorAll("[id]")) {
    if (ids.has(element.id)) faults.push(`id ${element.id} is there twice`);
    ids.add(element.id);
  }
  for (const link of document.querySelectorAll('a[href^="#"]')) {
    const name = decodeURIComponent(link.getAttribute("href").slice(1));
    if (name && !ids.has(name)) faults.push(`link to ${name} leads nowhere`);
  }

  // Colours of text against the nearest background that is not transparent, as WCAG 2 counts them.
  const parsed = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map(
      (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parsed(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour.slice(0, 3);
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
  };
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !isShown(element) || element.closest("script, style, title")) continue;
    const style = getComputedStyle(element);
    const ink = parsed(element.closest("svg") ? style.fill : style.color);
    if (ink.length < 3 || (ink.length === 4 && ink[3] < 1)) continue;
    const [low, high] = [light(ink.slice(0, 3)), light(behind(element))].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    const isLarge = parseFloat(style.fontSize) >= 24;
    if (contrast < (isLarge ? 3 : 4.5)) {
      faults.push(`"${words(element)}" has a contrast of ${contrast.toFixed(1)}`);
    }
  }
  return [...new Set(faults)];
}
