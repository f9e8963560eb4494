/* Swap in a newer report while the run goes on, and keep filters, the chosen sample, open tables and the place on the page. */
const POLL_MS = 1000;
let shownVersion = document.documentElement.dataset.version;

function busy() {
  const field = document.activeElement;
  return (field && ["INPUT", "SELECT", "TEXTAREA"].includes(field.tagName) && field.closest("#filters")) || !getSelection().isCollapsed;
}

async function refresh() {
  const told = await (await fetch("state", { cache: "no-store" })).json();
  document.getElementById("state").textContent = told.said;
  if (told.version === shownVersion || busy()) return;
  const text = await (await fetch(".", { cache: "no-store" })).text();
  const next = new DOMParser().parseFromString(text, "text/html");
  const open = [...document.querySelectorAll("details")].map((each) => each.open);
  const list = document.getElementById("samples-list");
  const scrolled = list ? list.scrollTop : 0;
  document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
  shownVersion = next.documentElement.dataset.version;
  [...document.querySelectorAll("details")].forEach((each, place) => { each.open = open[place] ?? each.open; });
  startPage();
  const renewed = document.getElementById("samples-list");
  if (renewed) renewed.scrollTop = scrolled;
}

async function poll() {
  try {
    await refresh();
  } catch {
    document.getElementById("state").textContent = "the live view has ended";
  }
  setTimeout(poll, POLL_MS);
}
setTimeout(poll, POLL_MS);
