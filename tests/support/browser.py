"""Opens a page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1280,2000", "--virtual-time-budget=20000"),
)
needs_browser = pytest.mark.skipif(_CHROMIUM is None, reason="no chromium on this machine")

# Runs in the page once it is drawn, uses it as a person would, and writes down what it sees.
_LOOK = """
<script>
(async function look() {
  const root = document.documentElement;
  if (root.dataset.ready !== "yes") { setTimeout(look, 50); return; }
  const all = (what) => [...document.querySelectorAll(what)];
  const texts = (what) => all(what).map((each) => each.textContent);
  const column = (table, n) => texts(`#${table} tbody td:nth-child(${n})`);
  const click = (what) => document.querySelector(what).click();
  const type = (id, words) => {
    const field = document.getElementById(id);
    field.value = words;
    field.dispatchEvent(new Event("input"));
  };
  const timeline = document.getElementById("timeline");
  const map = document.getElementById("map");
  const drawn = () => new Promise((done) => setTimeout(done, 300));
  // Moves the pointer to a place on the map, given on its axes; gives what is told there.
  const pointAtMap = (x, y) => {
    const place = map.querySelector(".nsewdrag").getBoundingClientRect();
    const along = (at, [from, to], pixels) => ((at - from) / (to - from)) * pixels;
    map.dispatchEvent(new PointerEvent("pointermove", {
      clientX: place.left + along(x, map.layout.xaxis.range, place.width),
      clientY: place.bottom - along(y, map.layout.yaxis.range, place.height),
    }));
    return all("#map-label:not([hidden]) > *").map((each) => each.textContent);
  };
  const seen = {};
  seen.labels = texts("#timeline .annotation-text");
  USE
  seen.images = all("img").length;
  root.dataset.seen = JSON.stringify(seen);
})();
</script>
"""


def opened(page: Path) -> dict[str, str]:
    """What a browser makes of a page: the notes that its scripts left on the root element."""
    assert _CHROMIUM is not None
    profile = f"--user-data-dir={page.parent / 'browser'}"
    done = subprocess.run(
        [_CHROMIUM, *_OPTIONS, profile, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    root = re.search(r"<html[^>]*>", done.stdout)
    assert root is not None
    return {name: unescape(note) for name, note in re.findall(r'data-(\w+)="([^"]*)"', root[0])}


def look(page: Path, use: str) -> dict[str, Any]:
    """What a person sees who does `use` with the page; an error on its console fails the test.

    After what takes time to draw, `use` awaits `drawn()`.
    """
    text = page.read_text(encoding="utf-8")
    script = _LOOK.replace("USE", use.strip())
    page.write_text(text.replace("</body>", script + "</body>"), encoding="utf-8")
    notes = opened(page)
    assert notes["errors"] == "", notes["errors"]
    seen: dict[str, Any] = json.loads(notes["seen"])
    return seen


def check_alone(text: str) -> None:
    """The page fetches nothing, is filled in, and tells no path of this machine."""
    fetched = re.findall(r"<(?:script|img|iframe)[^>]+src=|<link[^>]+href=\"(?!data:)", text)
    assert not fetched, fetched
    assert "{{" not in text.partition("<script>")[0]
    assert "/home/me" not in text
