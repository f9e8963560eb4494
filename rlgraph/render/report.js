"use strict";
function startTheme() {
  document.getElementById("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : window.matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
}
function startTracks() {
  for (const tracks of document.querySelectorAll(".tracks")) {
    const scale = tracks.querySelector(".scale");
    let zoom = 1;
    const zoomTo = (wanted, x) => {
      const next = Math.min(Math.max(wanted, 1), 60);
      const before = (tracks.scrollLeft + x) / zoom;
      scale.style.setProperty("--zoom", next);
      tracks.scrollLeft = before * next - x;
      zoom = next;
    };
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => zoomTo(zoom * Number(button.dataset.zoom), tracks.clientWidth / 2));
    }
    tracks.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoomTo(zoom * Math.exp(-event.deltaY / 300), event.clientX - tracks.getBoundingClientRect().left);
    }, { passive: false });
  }
}
