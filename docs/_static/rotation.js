// One loss, ½ (curvatures 1 and 1/100), whose valley is rotated against the axes by a slider. The start rotates with it,
// so the problem is the same at every angle; only methods that scale each coordinate separately notice the angle.
(() => {
  const FLAT = 1 / 100, STEPS = 400, GOAL = 1e-4;
  const METHODS = {
    Adam: { lr: 0.1, of: () => {
      let m = [0, 0], v = [0, 0];
      return (g, t) => g.map((x, i) => {
        m[i] = 0.9 * m[i] + 0.1 * x;
        v[i] = 0.999 * v[i] + 0.001 * x * x;
        return (m[i] / (1 - 0.9 ** t)) / (Math.sqrt(v[i] / (1 - 0.999 ** t)) + 1e-12);
      });
    } },
    Adagrad: { lr: 0.5, of: () => {
      const v = [0, 0];
      return g => g.map((x, i) => x / (Math.sqrt(v[i] += x * x) + 1e-12));
    } },
    "Gradient descent": { lr: 1, of: () => g => g },
  };
  const turned = ([x, y], angle) => [
    x * Math.cos(angle) - y * Math.sin(angle), x * Math.sin(angle) + y * Math.cos(angle),
  ];
  const lossAt = (point, angle) => {
    const [u, w] = turned(point, -angle);
    return (u * u + FLAT * w * w) / 2;
  };

  function run(name, angle) {
    const { lr, of } = METHODS[name], direction = of(), places = [], losses = [];
    let point = turned([1, 1], angle);
    for (let t = 1; t <= STEPS + 1; t++) {
      places.push(point);
      losses.push(lossAt(point, angle));
      const [u, w] = turned(point, -angle);
      const update = direction(turned([u, FLAT * w], angle), t);
      point = point.map((x, i) => x - lr * update[i]);
    }
    const reached = losses.findLastIndex(loss => loss >= GOAL) + 1;  // from when on it stays below
    return { places, losses, reached };
  }

  const place = ([x, y]) => `${(150 + 90 * x).toFixed(1)},${(150 - 90 * y).toFixed(1)}`;
  const line = (points, kind) => `<polyline class="${kind}" points="${points.join(" ")}"/>`;

  function level(height, angle) {
    const points = [];
    for (let k = 0; k <= 120; k++) {
      const a = 2 * Math.PI * k / 120, r = Math.sqrt(2 * height);
      points.push(place(turned([r * Math.cos(a), r * Math.sin(a) / Math.sqrt(FLAT)], angle)));
    }
    return line(points, "level");
  }

  const plane = ({ places }, angle) =>
    `<line class="axis" x1="0" x2="300" y1="150" y2="150"/><line class="axis" x1="150" x2="150" y1="0" y2="300"/>`
    + [0.003, 0.012, 0.05, 0.2, 0.5].map(height => level(height, angle)).join("")
    + line(places.map(place), "path")
    + `<circle class="dot" cx="${place(places[0]).split(",")[0]}" cy="${place(places[0]).split(",")[1]}" r="5"/>`
    + `<text x="8" y="16">path from the dot to the minimum</text>`;

  function curve(losses, kind) {
    const points = losses.map((loss, t) => {
      const height = Math.min(276, 30 + 40 * (Math.log10(0.5) - Math.log10(Math.max(loss, 1e-12))));
      return `${(300 * t / STEPS).toFixed(1)},${height.toFixed(1)}`;
    });
    return line(points, kind);
  }

  function draw(root) {
    const angle = Number(root.querySelector("input[type=range]").value);
    const name = root.querySelector("input[type=radio]:checked").value;
    const now = run(name, angle * Math.PI / 180), straight = run(name, 0);
    const [left, right] = root.querySelectorAll("svg");
    left.innerHTML = plane(now, angle * Math.PI / 180);
    right.innerHTML = curve(straight.losses, "reference") + curve(now.losses, "path")
      + `<text x="60" y="16">loss by step (log scale); dashed: at 0°</text>`
      + `<text x="2" y="296">0</text><text x="272" y="296">${STEPS}</text>`;
    const count = steps => steps > STEPS ? `more than ${STEPS}` : steps;
    root.querySelector("output").textContent =
      `${name}, steps until the loss stays below 0.0001: ${count(now.reached)} at ${angle}°, ${count(straight.reached)} at 0°.`;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.getElementById("rotation");
    if (!root) return;
    root.addEventListener("input", () => draw(root));
    draw(root);
  });
})();
