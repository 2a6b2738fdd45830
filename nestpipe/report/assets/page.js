"use strict";
// Draws the figures, again when the reader changes between light and dark.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const darkColours = JSON.parse(document.getElementById("dark").textContent);
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const isTouched = matchMedia("(pointer: coarse)");

  // Figures come in light colours. Returns a copy, because Plotly changes what it is given.
  const inScheme = (value) => {
    if (Array.isArray(value)) return value.map(inScheme);
    if (value !== null && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, inScheme(part)]));
    return isDark.matches && Object.hasOwn(darkColours, value) ? darkColours[value] : value;
  };

  const draw = () => Promise.all(Object.entries(figures).map(([id, figure]) => {
    const {data, layout} = inScheme(figure);
    if (isTouched.matches) layout.dragmode = false; // a finger on a figure scrolls the page
    const config = {responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset"};
    return Plotly.react(document.getElementById(id), data, layout, config);
  }));

  isDark.addEventListener("change", draw);
  draw().then(() => { document.documentElement.dataset.drawn = "true"; });
})();
