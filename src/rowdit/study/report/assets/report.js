// Values under the pointer, or under the arrow keys, in every chart. The page reads without it.
"use strict";
for (const plot of document.querySelectorAll(".plot[data-chart]")) {
  const chart = JSON.parse(plot.dataset.chart);
  const steps = [...new Set(chart.series.flatMap((series) => series.x))].sort((a, b) => a - b);
  const cursor = document.createElement("div");
  const tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  tip.setAttribute("role", "status");
  let shown = -1;

  const nearest = (values, x) => {
    let best = 0;
    values.forEach((value, index) => {
      if (Math.abs(value - x) < Math.abs(values[best] - x)) best = index;
    });
    return best;
  };
  const format = (x) => x.toLocaleString("en", { maximumFractionDigits: chart.high - chart.low < 20 ? 2 : 0 });
  const line = (name, value, style) => {
    const row = document.createElement("p");
    for (const part of [name, value]) row.appendChild(document.createElement("span")).textContent = part;
    if (style !== undefined) row.firstChild.className = `named s${style}`;
    return row;
  };
  const hide = () => {
    cursor.remove();
    tip.remove();
    shown = -1;
  };
  const show = (index) => {
    if (index === shown) return;
    shown = index;
    const x = steps[index];
    const place = (x - chart.low) / (chart.high - chart.low);
    tip.replaceChildren(line(chart.name, format(x)));
    for (const series of chart.series) {
      const index = nearest(series.x, x);
      const at = format(series.x[index]); // a series without a value here shows its nearest, and where that is
      const value = at === format(x) ? series.y[index] : `${series.y[index]} (at ${at})`;
      tip.appendChild(line(series.name, value, series.style));
    }
    cursor.style.left = `${100 * place}%`;
    tip.style.left = place < 0.5 ? `calc(${100 * place}% + 10px)` : "auto";
    tip.style.right = place < 0.5 ? "auto" : `calc(${100 - 100 * place}% + 10px)`;
    plot.append(cursor, tip);
  };
  const follow = (event) => {
    const box = plot.getBoundingClientRect();
    const x = chart.low + ((event.clientX - box.left) / box.width) * (chart.high - chart.low);
    show(nearest(steps, x));
  };
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    show(shown < 0 ? (move > 0 ? 0 : steps.length - 1) : Math.min(Math.max(shown + move, 0), steps.length - 1));
  });
}
