"use strict";
// Each clip: the chosen frame is shown larger; the sound's position is a line on the time axis; a click on a frame or on
// the waveform seeks the sound.
for (const medium of document.querySelectorAll(".medium")) {
  const axis = medium.querySelector(".axis");
  if (!axis) continue;
  const audio = medium.querySelector("audio");
  const scroll = medium.querySelector(".axis-scroll");
  const head = medium.querySelector(".playhead");
  const stage = medium.querySelector(".stage");
  const frames = [...medium.querySelectorAll(".frame")];
  const span = Number(axis.dataset.span);
  const choose = (chosen) => {
    for (const frame of frames) {
      frame.classList.toggle("now", frame === chosen);
      if (frame === chosen) frame.setAttribute("aria-current", "time");
      else frame.removeAttribute("aria-current");
    }
    const picture = chosen && chosen.querySelector("img");
    stage.hidden = !picture;
    if (!picture) return;
    const large = stage.querySelector("img");
    if (large.src !== picture.src) {
      large.src = picture.src;
      large.width = picture.getAttribute("width");
      large.height = picture.getAttribute("height");
      stage.querySelector("figcaption").textContent = chosen.title;
    }
  };
  if (frames.length) choose(frames[0]);
  if (!audio) {
    for (const frame of frames) frame.addEventListener("click", () => choose(frame));
    continue;
  }
  const place = () => {
    const now = audio.currentTime;
    head.hidden = false;
    head.style.left = `${(100 * now) / span}%`;
    if (frames.length) choose(frames.findLast((frame) => Number(frame.dataset.time) <= now + 1e-3) || frames[0]);
  };
  const follow = () => {
    place();
    const x = (axis.clientWidth * audio.currentTime) / span;
    if (x < scroll.scrollLeft || x > scroll.scrollLeft + scroll.clientWidth - 40) scroll.scrollLeft = x - 40;
    if (!audio.paused) requestAnimationFrame(follow);
  };
  const seek = (time) => {
    audio.currentTime = Math.min(time, Number.isFinite(audio.duration) ? audio.duration : time);
    place();
  };
  audio.addEventListener("play", () => {
    for (const other of document.querySelectorAll("audio")) if (other !== audio) other.pause();
    follow();
  });
  for (const name of ["seeking", "seeked", "timeupdate", "pause", "ended"]) audio.addEventListener(name, place);
  for (const frame of frames) {
    frame.addEventListener("click", () => {
      seek(Number(frame.dataset.time));
      choose(frame); // also for a frame after the end of the sound
    });
  }
  medium.querySelector(".wave").addEventListener("click", (event) => {
    seek((span * (event.clientX - axis.getBoundingClientRect().left)) / axis.clientWidth);
  });
}

// Filter: every word has to stand in the sample's id, source or flags.
const filter = document.getElementById("filter");
if (filter) {
  const articles = [...document.querySelectorAll("article")];
  const apply = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const article of articles) {
      article.hidden = !words.every((word) => article.dataset.search.includes(word));
      if (article.hidden) article.querySelectorAll("audio").forEach((audio) => audio.pause());
      else shown += 1;
    }
    document.getElementById("shown").textContent = `${shown} of ${articles.length} samples on this page`;
    document.getElementById("none").hidden = shown > 0;
  };
  filter.addEventListener("input", apply);
  document.getElementById("filter-form").addEventListener("submit", (event) => event.preventDefault());
  for (const badge of document.querySelectorAll("[data-filter]")) {
    badge.addEventListener("click", () => {
      filter.value = filter.value === badge.dataset.filter ? "" : badge.dataset.filter;
      apply();
      filter.scrollIntoView({ block: "nearest" });
    });
  }
  apply();
}
